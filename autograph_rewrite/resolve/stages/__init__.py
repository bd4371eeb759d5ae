"""Which pipeline stage each node belongs to."""
