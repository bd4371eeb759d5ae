"""Variables in TensorFlow's checkpoint format: each worker writes a part, and the parts become one bundle.

    SaveV2 part-0, SaveV2 part-1 ─► MergeV2Checkpoints ─► variables.index, variables.data-00000-of-00002, ...

It is what `tf.train.Saver` reads under the names of the variables, and `tf.train.load_checkpoint` anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.checkpoints.deal import Piece
from autograph_rewrite.runtime.checkpoints.folder import Damaged
from autograph_rewrite.runtime.checkpoints.page_cache import kept_small


def write_part(prefix: Path, pieces: Sequence[Piece], values: Mapping[str, Any]) -> None:
    """Write pieces of variables.

    Args:
        prefix: of the files.
        pieces: which; at least one.
        values: whole values by name.
    """
    tf = tensorflow()
    with tf.device("CPU:0"), kept_small(prefix):
        cut = [values[p.name] if p.rows is None else values[p.name][p.rows[0] : p.rows[1]] for p in pieces]
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=[piece.name for piece in pieces],
            shape_and_slices=[piece.slice_spec for piece in pieces],
            tensors=[tf.convert_to_tensor(value) for value in cut],
        )


def merge_parts(parts: Sequence[Path], prefix: Path) -> None:
    """Make one bundle of parts; their files move."""
    tf = tensorflow()
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=[str(part) for part in parts], destination_prefix=str(prefix), delete_old_dirs=False
        )


def names_in(prefix: Path) -> list[str]:
    """Return the names of all values that a bundle has."""
    return [name for name, _ in tensorflow().train.list_variables(str(prefix))]


def read(prefix: Path, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield whole values by name, those that the bundle has.

    Raises:
        Damaged: the checksum of a value is not that of what was written.
    """
    tf = tensorflow()
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        kinds = reader.get_variable_to_dtype_map()
        for name in names:
            if kinds.get(name) == tf.variant:  # the position of an iterator: nothing that numpy has
                yield (
                    name,
                    tf.raw_ops.RestoreV2(
                        prefix=str(prefix), tensor_names=[name], shape_and_slices=[""], dtypes=[tf.variant]
                    )[0],
                )
            elif name in kinds:
                yield name, reader.get_tensor(name)
    except (tf.errors.OpError, RuntimeError) as error:
        raise Damaged(f"the checkpoint {prefix.parent} is damaged: {str(error).splitlines()[0]}") from None
