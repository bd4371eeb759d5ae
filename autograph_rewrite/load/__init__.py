"""Loaders, which turn graphs, files, functions and Keras models into a training graph."""
