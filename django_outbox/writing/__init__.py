"""Write events in the caller's transaction, and hand them over after its commit."""
