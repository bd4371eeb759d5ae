"""Canonicalisation: passes that bring a graph into a form that propagation can divide."""
