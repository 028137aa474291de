"""The worker: threads and processes that deliver. Each part knows only queues or the table."""
