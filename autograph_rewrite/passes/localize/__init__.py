"""Localisation: passes that make row indices relative to a block, so that micro-batches need no barrier."""
