"""Rules: how each op divides, and the shape and contents of its results; a family of ops per module, all in `table`."""
