"""Running a rewritten item: Session, tf.function, Keras, in one process or as one of a job."""
