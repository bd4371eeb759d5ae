"""Where a rewrite begins to differ: the first pass after which `verify` fails, and the first value and edge."""
