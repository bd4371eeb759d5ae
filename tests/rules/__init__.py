"""Rules of placement, each checked by running its op on blocks."""
