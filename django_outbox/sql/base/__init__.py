"""What the SQL of all databases has in common, and the operations that each of them defines."""
