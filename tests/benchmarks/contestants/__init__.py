"""Other outboxes and queues, each in a virtual environment of its own, asked for the same work."""
