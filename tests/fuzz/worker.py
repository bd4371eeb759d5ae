"""A process that takes seeds from a pipe and answers with outcomes, in one TensorFlow with eight virtual devices."""

from __future__ import annotations

import gc
import os
import resource
from multiprocessing.connection import Connection

DEVICES = 8


def prepare() -> None:
    """Set up TensorFlow: quiet, few threads, eight virtual CPU devices."""
    os.environ.update(
        CUDA_VISIBLE_DEVICES="-1",
        KERAS_BACKEND="tensorflow",
        OMP_NUM_THREADS="1",
        TF_CPP_MIN_LOG_LEVEL="3",
        TF_NUM_INTEROP_THREADS="4",
        TF_NUM_INTRAOP_THREADS="1",
    )
    import tensorflow as tf

    tf.compat.v1.logging.set_verbosity("ERROR")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(DEVICES)])


def serve(pipe: Connection) -> None:
    """Answer until the pipe is closed: each seed with its outcome and the memory that this process has."""
    prepare()
    from tests.fuzz import one

    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)  # tracebacks of programs that were refused are not worth reading twice
        os.dup2(nothing.fileno(), 2)
    pipe.send("ready")
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        pipe.send((one.run(seed).as_dict(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
        gc.collect()
