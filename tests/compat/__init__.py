"""The package with each TensorFlow that it takes: `make compat`."""
