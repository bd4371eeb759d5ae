"""The graph as plain Python objects: exact, editable, verified, and free of TensorFlow."""
