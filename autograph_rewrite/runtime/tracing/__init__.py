"""Profiling: steps of this process, or of all ranks of a job, traced by TensorFlow's profiler."""
