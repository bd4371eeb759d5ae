"""Passes on the batch: slicing inputs, shapes of blocks, empty blocks, random numbers per replica."""
