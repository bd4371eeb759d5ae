"""Loops: what their gradients are given in lists, and what of it is computed again."""
