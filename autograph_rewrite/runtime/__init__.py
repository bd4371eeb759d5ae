"""Running a rewritten item: Session, tf.function, Keras, and the numeric check against the original."""
