"""TensorFlow 1 reference variables, converted to resource variables."""
