"""Joining a job: TensorFlow's server, its address, its devices."""
