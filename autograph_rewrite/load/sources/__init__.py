"""Sources of graphs: files, tf.Graph, functions, Keras models, SavedModels."""
