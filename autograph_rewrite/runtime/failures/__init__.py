"""Failure detection: peers that failed are found and named within a timeout."""
