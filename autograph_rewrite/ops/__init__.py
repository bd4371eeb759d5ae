"""Ops: the facts and rules of every op of TensorFlow, in one place."""
