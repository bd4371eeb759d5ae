"""Function mode: training functions over variables that each process has made for itself."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.jobs.programs.job import Case, Job, Results
from tests.zoo import ZOO

SIZES = (8, 7, 1, 11)


def zoo(name: str, optimizer: str = "adam", mode: str = "mirrored", replicas: int = 1, spoilt: float = 1.0) -> Case:
    """Return the case of a zoo entry; `spoilt` scales the initial values of all workers but the first."""

    def case(job: Job) -> Results:
        built = ZOO[name].build(optimizer=optimizer)
        if job.task:
            for variable in built.variables.values():
                if "float" in str(variable.dtype):
                    variable.assign(spoilt * tf.convert_to_tensor(variable))
        step = tf.function(built.step, input_signature=built.specs)
        if job.is_rewritten:
            step = ar.distribute(built.step, job.config(mode, replicas), batch_inputs=dict(built.batch_inputs))
        results = {}
        for at, size in enumerate(SIZES):
            whole = zip(built.feeds(at, size), built.batch_inputs.values(), strict=True)
            parts = [job.part(value, axis) for value, axis in whole]
            outputs = step(*map(tf.constant, parts))
            results.update({f"{name} of step {at}": np.asarray(value) for name, value in outputs.items()})
        results.update({f"variable {name}": np.asarray(value) for name, value in built.variables.items()})
        return results

    return case


CASES: dict[str, Case] = {
    "custom_loop": zoo("custom_loop"),
    "custom_loop_shared_two_devices": zoo("custom_loop", mode="shared", replicas=2),
    "function_sparse": zoo("function_sparse", "adagrad"),
    "loss_scaling": zoo("loss_scaling"),
    "other_initial_values": zoo("function_dense", spoilt=1.5),
}
