"""Micro-batches: their order in time, unrolled or as a loop."""
