"""Ops: the traits of each op of TensorFlow, in one place."""
