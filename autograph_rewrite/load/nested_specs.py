"""Nested arguments and results as flat lists of named tensors: `{"image": t}` given as `x` is "x/image"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# What the flat components of TensorFlow's composite tensors are called, by the name of their spec's class.
_COMPONENTS = {
    "SparseTensorSpec": ("indices", "values", "dense_shape"),
    "IndexedSlicesSpec": ("values", "indices", "dense_shape"),
}


class SpecLeaf(NamedTuple):
    """One tensor (or tensor spec) of a structure; `dense` unless it is a part of a composite tensor."""

    path: str
    tensor: Any
    dense: bool


def as_spec(argument: Any) -> Any:
    """Return what to trace for an argument: arrays, tensors and Keras inputs become specs, at any depth."""
    import tensorflow as tf

    if isinstance(argument, tf.TypeSpec):
        return argument
    if isinstance(argument, tf.Tensor) or hasattr(argument, "__array_interface__"):
        return tf.TensorSpec(argument.shape, argument.dtype)
    if _is_keras_tensor(argument):
        return tf.TensorSpec(argument.shape, argument.dtype)
    if isinstance(argument, Mapping | list | tuple):
        return tf.nest.map_structure(as_spec, argument)
    return argument  # a Python value is part of the trace


def of_any_batch(argument: Any) -> Any:
    """Return what to trace for the data of a Keras model: arrays and tensors stand for batches of any size."""
    import tensorflow as tf

    if isinstance(argument, Mapping | list | tuple):
        return tf.nest.map_structure(of_any_batch, argument)
    is_data = isinstance(argument, tf.Tensor) or hasattr(argument, "__array_interface__")
    spec = as_spec(argument)
    if not is_data or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _is_keras_tensor(argument: Any) -> bool:
    return any(base.__name__ == "KerasTensor" for base in type(argument).__mro__)


def leaves(structure: Any, path: str) -> Iterator[SpecLeaf]:
    """Yield the tensors of a structure in TensorFlow's own flat order; Python values have no place in it."""
    import tensorflow as tf

    if isinstance(structure, tf.TensorSpec | tf.Tensor):
        yield SpecLeaf(path, structure, True)
    elif isinstance(structure, tf.TypeSpec) or hasattr(structure, "_type_spec"):
        yield from _components(structure, path)
    elif isinstance(structure, Mapping):
        for key in sorted(structure):
            yield from leaves(structure[key], _join(path, key))
    elif isinstance(structure, tuple) and hasattr(structure, "_fields"):
        for key, value in zip(structure._fields, structure, strict=True):
            yield from leaves(value, _join(path, key))
    elif isinstance(structure, list | tuple):
        for index, value in enumerate(structure):
            yield from leaves(value, _join(path, index))
    elif type(structure).__module__ != "builtins":
        for index, value in enumerate(tf.nest.flatten(structure, expand_composites=True)):
            if value is not structure:
                yield from leaves(value, _join(path, index))


def _components(composite: Any, path: str) -> Iterator[SpecLeaf]:
    """Yield the parts of a sparse or ragged tensor, an iterator, a variable..., or of the spec of one."""
    import tensorflow as tf

    parts = tf.nest.flatten(composite, expand_composites=True)
    if len(parts) == 1:
        yield SpecLeaf(path, parts[0], False)
        return
    spec = composite if isinstance(composite, tf.TypeSpec) else composite._type_spec
    names: tuple[str, ...] | None = _COMPONENTS.get(type(spec).__name__)
    if names is None and isinstance(spec, tf.RaggedTensorSpec):
        names = ("flat_values", *(f"row_splits_{i}" for i in range(len(parts) - 1)))
    for index, part in enumerate(parts):
        yield SpecLeaf(_join(path, names[index] if names is not None else index), part, False)


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def output_leaves(structure: Any) -> Iterator[SpecLeaf]:
    """Yield the results of a function: a dict's by key, else `output_0`, `output_1`... as SavedModel does."""
    if isinstance(structure, Mapping):
        yield from leaves(structure, "")
    elif isinstance(structure, list | tuple) and not hasattr(structure, "_fields"):
        for index, value in enumerate(structure):
            yield from leaves(value, f"output_{index}")
    elif hasattr(structure, "_fields"):
        yield from leaves(structure, "")
    else:
        yield from leaves(structure, "output_0")
