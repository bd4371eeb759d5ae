"""Damaged files of every format, each read in words, in time, in memory, and without a trace: `make damage`."""
