"""Rules of sizes and shapes: integers are interpreted symbolically instead of being placed."""
