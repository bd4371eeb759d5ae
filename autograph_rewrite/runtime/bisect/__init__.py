"""Where a rewrite begins to differ: the first pass behind which `verify` fails, and the first value and edge."""
