"""tf.data pipelines, sharded between workers."""
