"""What hangs on the house and is not needed to live in it."""
