"""Loaders: graphs, files, functions and Keras models to a TrainingGraph."""
