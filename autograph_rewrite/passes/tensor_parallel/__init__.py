"""Tensor parallelism: the program that each device of a replica runs, of its blocks, or a node for each device."""
