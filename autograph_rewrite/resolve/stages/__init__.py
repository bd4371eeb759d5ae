"""The pipeline stage of each node."""
