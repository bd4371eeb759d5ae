"""The normal form that analysis and passes need: one flat graph over resource variables."""
