"""Auxiliary variables of a rewritten function: created here, one per replica, and captured by every trace.

    step = ar.distribute(train_step, {..., compressor: topk}, spec)
    step.state                                  a tf.Module: "w/autograph_residual/replica_0", ...
    tf.train.Checkpoint(model=model, step=step) saves and restores them

They are made when the function is first traced; a checkpoint that was restored before gives them their values then.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from autograph_rewrite.errors import GraphError
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.training_graph import Variable

Class = TypeVar("Class", bound=type)


class ExtraState:
    """The variables that all traces of one function or model share.

    Attributes:
        module: a tf.Module that tracks them.
    """

    def __init__(self) -> None:
        self._tf = tensorflow()
        self.module = self._tf.Module(name="state")

    def of(self, variable: Variable, replica: int, device: str) -> Any:
        """Return one replica's variable, making it if there is none; replicas are counted over all processes.

        Args:
            variable: what the rewrite declared.
            device: where to make it.
        """
        name = f"{variable.name}/replica_{replica}"
        found = getattr(self.module, name, None)
        if found is None:
            with self._tf.init_scope(), self._tf.device(device):
                zeros = self._tf.zeros(variable.shape, variable.dtype)
                found = self._tf.Variable(zeros, trainable=False, name=variable.name)
            setattr(self.module, name, found)
        if (tuple(found.shape), found.dtype.name) != (variable.shape, variable.dtype):
            raise GraphError(
                f"'{variable.name}' is {found.dtype.name}{list(found.shape)} in one trace of the step and "
                f"{variable.dtype}{list(variable.shape or ())} in another",
                hint="trace the step once: pass specs to ar.distribute",
            )
        return found


def trackable(cls: Class) -> Class:
    """Return a subclass that `tf.train.Checkpoint` takes; instances track what `track` is told."""
    made: Class = _trackable(cls)
    return made


@functools.cache
def _trackable(cls: Any) -> Any:
    base = tensorflow().__internal__.tracking.Trackable
    return type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__module__": cls.__module__})


def track(owner: Any, name: str, child: Any) -> None:
    """Let checkpoints of `owner`, which is trackable, hold `child` under `name`.

    Args:
        owner: a trackable object.
        name: of the dependency.
        child: what is saved with it.
    """
    owner._track_trackable(child, name)
