"""The numeric check of a rewrite, the search for its first wrong pass and value, and the reduction of failures."""
