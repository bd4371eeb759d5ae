"""Edges of a plan: where placements disagree, whom the conversion serves, and how it is lowered."""
