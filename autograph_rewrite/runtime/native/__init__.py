"""Graphs as functions that TensorFlow calls by name, without tracing."""
