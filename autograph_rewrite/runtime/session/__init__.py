"""Graph mode: a session that takes the names of the original graph."""
