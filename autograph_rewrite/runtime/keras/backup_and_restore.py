"""BackupAndRestore in a job: the chief writes backups atomically, and all workers restore from them.

    save      new weights ─► weights     killed before: the old epoch
              new epoch   ─► epoch       killed between the two: the new epoch is found, and known to be the weights'
    restore   worker 0's weights and epoch go to all, who may not see its files

Keras writes one file over the old one, and then the other. When any process dies, the launcher ends worker 0, too,
wherever it is just then.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.load.signature.keras_library import is_legacy, library_of, wraps
from autograph_rewrite.load.signature.keras_state import callbacks_of, variables_of
from autograph_rewrite.runtime.consensus.agreement import adopt_from_chief
from autograph_rewrite.runtime.consensus.rendezvous import Rendezvous
from autograph_rewrite.runtime.keras.written_files import WrittenFiles


class Backups:
    """What one worker does differently with the callbacks of a model's `fit`.

    Args:
        member: which worker it is.
        seconds: how long to wait for the others.
        model: the model.
        files: that worker 0 writes.
    """

    def __init__(self, member: Membership, seconds: float, model: Any, files: WrittenFiles) -> None:
        self._member = member
        self._seconds = seconds
        self._model = model
        self._files = files

    def fitting(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's `fit` with its callbacks changed."""

        @wraps(fit)
        def fitted(*args: Any, **kwargs: Any) -> Any:
            callbacks = library_of(self._model).callbacks
            for callback in callbacks_of(inspect.signature(fit).bind(*args, **kwargs).arguments.get("callbacks")):
                if isinstance(callback, callbacks.BackupAndRestore):
                    (self._change_legacy if is_legacy(self._model) else self._change)(callback)
                if isinstance(callback, callbacks.CSVLogger) and not self._member.is_chief:
                    callback.filename = os.devnull
            return fit(*args, **kwargs)

        return fitted

    def _change(self, callback: Any) -> None:
        callback._load_model = functools.partial(self._load, callback)
        callback._save_model = self._files.of_chief(functools.partial(_save, callback), "BackupAndRestore")
        if not self._member.is_chief:
            callback.delete_checkpoint = False

    def _change_legacy(self, callback: Any) -> None:
        """As `_change`, of tf_keras: TensorFlow's checkpoints are written whole, and a model has a training state."""
        begin = callback.on_train_begin

        def on_train_begin(logs: Any = None) -> None:
            begin(logs)
            state = callback._training_state
            is_restored = state.read_checkpoint_manager.latest_checkpoint is not None
            counters = [state._ckpt_saved_epoch, state._ckpt_saved_batch, self._model._train_counter]
            self._adopt([is_restored], lambda: [*variables_of(self._model), *counters])
            state.back_up = self._files.of_chief(state.back_up, "BackupAndRestore")
            if not self._member.is_chief:
                state.delete_backup = _nothing

        callback.on_train_begin = on_train_begin

    def _load(self, callback: Any) -> None:
        model = self._model
        if self._member.is_chief:
            _finish_saving(callback)
            type(callback)._load_model(callback)
        mine = [os.path.exists(callback._weights_path), model._initial_epoch or 0]
        model._initial_epoch = self._adopt(mine, lambda: variables_of(model))[1]

    def _adopt(self, mine: Sequence[int], variables: Callable[[], Sequence[Any]]) -> list[int]:
        """Begin where worker 0 does.

        Args:
            mine: whether this worker has restored something, and what else worker 0 is to tell of it.
            variables: returns what takes worker 0's values if it has.

        Returns:
            worker 0's `mine`.

        Raises:
            ClusterError: somebody is missing.
        """
        told = Rendezvous(self._member, self._seconds).rows(np.array(mine, np.int64), "restore a backup")[0]
        if told[0]:
            known = variables()
            values = adopt_from_chief(self._member, self._seconds, [variable.numpy() for variable in known])
            for variable, value in zip(known, values, strict=True) if not self._member.is_chief else ():
                variable.assign(value)
        return [int(number) for number in told]


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _save(callback: Any) -> None:
    """Write weights and epoch beside the old ones, then put them in their place."""
    if "://" in callback.backup_dir:  # a store of objects, which are written whole, and cannot be renamed
        type(callback)._save_model(callback)
        return
    weights, metadata = callback._weights_path, callback._training_metadata_path
    new_weights, new_metadata = _new(weights), _new(metadata)
    callback._weights_path, callback._training_metadata_path = new_weights, new_metadata
    try:
        type(callback)._save_model(callback)
    finally:
        callback._weights_path, callback._training_metadata_path = weights, metadata
    with open(new_metadata, encoding="utf-8") as file:
        said = json.load(file)
    with open(new_metadata, "w", encoding="utf-8") as file:
        json.dump({**said, "weights": _stamp(new_weights)}, file)  # Keras reads what it knows
    os.replace(new_weights, weights)
    os.replace(new_metadata, metadata)


def _finish_saving(callback: Any) -> None:
    """Put the epoch in its place if the process was killed when only the weights had been."""
    new_metadata = _new(callback._training_metadata_path)
    with suppress(OSError, ValueError, KeyError):
        with open(new_metadata, encoding="utf-8") as file:
            said = json.load(file)
        if said["weights"] == _stamp(callback._weights_path):
            os.replace(new_metadata, callback._training_metadata_path)


def _stamp(path: str) -> list[int]:
    """Return what a file keeps when it is renamed, and no other has."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def _new(path: str) -> str:
    """Return `backup/new.latest.weights.h5` for `backup/latest.weights.h5`."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"new.{name}")
