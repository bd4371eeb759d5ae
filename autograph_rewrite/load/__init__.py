"""Loaders: from graphs, files, functions and Keras models to a training graph."""
