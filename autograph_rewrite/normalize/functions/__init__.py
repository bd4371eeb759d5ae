"""Function calls, branches and loops, inlined and lowered to Switch, Merge and frames."""
