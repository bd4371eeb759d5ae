"""The normal form that analysis and passes work on: one flat graph over resource variables."""
