"""The machines; each knows only the queues or the table."""
