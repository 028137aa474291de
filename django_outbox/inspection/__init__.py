"""Read-only views of the table, workers and listeners for operators, at a bounded cost."""
