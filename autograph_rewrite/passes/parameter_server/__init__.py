"""Parameter servers: what the chief runs for all, and cached reads."""
