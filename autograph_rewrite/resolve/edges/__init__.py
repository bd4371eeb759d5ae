"""Edges of a plan: where placements disagree, which variable the conversion serves, and how it is lowered."""
