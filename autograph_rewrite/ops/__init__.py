"""Ops: what is known of each op of TensorFlow, in one place."""
