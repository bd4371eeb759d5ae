"""Function mode: a tf.function whose steps run on all replicas."""
