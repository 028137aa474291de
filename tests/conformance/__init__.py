"""What depends on the database: the only tests that run on every server."""
