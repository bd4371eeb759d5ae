"""The numeric check of a rewrite, the first pass and value that differ, and a minimal graph that does."""
