"""Reasons: why a value is placed as it is, and why a variable is not where another strategy would have it."""
