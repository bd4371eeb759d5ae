"""The work of a step: FLOPs and bytes of each op, and trip counts of loops."""
