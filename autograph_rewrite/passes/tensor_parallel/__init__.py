"""Tensor parallelism: tensors cut into blocks for the logical devices of a replica."""
