"""Parameter servers: nodes that the chief runs for all workers, and cached reads."""
