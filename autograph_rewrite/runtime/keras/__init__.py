"""Keras mode: a model whose steps run on all replicas."""
