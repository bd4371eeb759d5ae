"""Flatten the arguments of a step, and find the TensorSpecs with which it is traced.

A call with `{"image": float32[32, 28, 28]}` and `int64[32]` has two leaves. It is traced for float32[None, 28, 28] and
int64[None], so that the batch may have any size. If another axis changes its size, it becomes unknown as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.load.inputs import only_excludes
from autograph_rewrite.requires import tensorflow

Shape = tuple[int | None, ...] | None
COMPOSITES = frozenset(("SparseTensorSpec", "RaggedTensorSpec", "IndexedSlicesSpec"))
"""Specs with several tensors and one shape, whose dimensions may be open; other specs have to be equal."""


class ArgumentLeaf(NamedTuple):
    """One argument: a tensor's type and shape, or (`static`) a Python value or a spec that is part of the trace."""

    dtype: Any
    shape: Shape
    static: Hashable = None


Opens = Callable[[Sequence[ArgumentLeaf], Sequence[str]], list[ArgumentLeaf]]
"""Opens more dimensions of leaves, given their paths."""


class Flat(NamedTuple):
    """Arguments taken apart: equal structures have the same leaves in the same order."""

    structure: Hashable
    values: list[Any]
    leaves: list[ArgumentLeaf]


class Arguments:
    """The parameters of one function, and the batch axes of its arguments.

    Args:
        batch_inputs: axis by argument path; None for axis 0 of all arguments that have one.
    """

    def __init__(self, function: Callable[..., Any], batch_inputs: Mapping[str, int | None] | None = None) -> None:
        self._tf = tensorflow()
        self._batch = batch_inputs
        self._signature = _signature(function)
        self._eager = type(self._tf.constant(0))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments in the order of the parameters, with defaults filled in.

        Raises:
            TypeError: the function takes no such arguments.
        """
        if self._signature is None or (not kwargs and len(args) == len(self._signature.parameters)):
            return tuple(args), dict(kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Flat:
        """Flatten arguments."""
        flat = Flat(None, [], [])
        structure = (tuple([self._take(a, flat) for a in args]), *((k, self._take(v, flat)) for k, v in kwargs.items()))
        return flat._replace(structure=structure)

    def _take(self, value: Any, flat: Flat) -> Hashable:
        """Add the leaves of a value to `flat`; return its structure."""
        kind = type(value)
        if kind is self._eager:
            flat.values.append(value)
            flat.leaves.append(ArgumentLeaf(value.dtype, tuple(value.shape)))
            return None
        if isinstance(value, Mapping):
            return (kind, *((key, self._take(value[key], flat)) for key in sorted(value)))
        if isinstance(value, tuple | list):
            return (kind, *[self._take(item, flat) for item in value])
        self._take_leaf(value, flat)
        return None

    def _take_leaf(self, value: Any, flat: Flat) -> None:
        tf = self._tf
        if isinstance(value, tf.Variable):
            raise GraphError(
                f"the step is given the variable '{value.name}' as an argument",
                hint="let the function use it from outside, as a global, an attribute or a closure, not as an argument",
            )
        if isinstance(value, np.ndarray | np.generic):
            value = tf.convert_to_tensor(value)
        if isinstance(value, tf.Tensor | tf.TensorSpec):
            rank = value.shape.rank
            flat.values.append(value)
            flat.leaves.append(ArgumentLeaf(value.dtype, None if rank is None else tuple(value.shape)))
        elif isinstance(value, tf.TypeSpec) or hasattr(value, "_type_spec"):
            spec = value if isinstance(value, tf.TypeSpec) else value._type_spec
            flat.values.append(value)
            flat.leaves.append(ArgumentLeaf(None, None, spec))
        else:
            # With its type, because True and 1 are equal but different arguments.
            flat.leaves.append(ArgumentLeaf(None, None, (type(value), value if _is_hashable(value) else id(value))))

    def specs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[ArgumentLeaf]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the specs with which arguments are traced.

        Args:
            leaves: the traced leaves, in order.
        """
        remaining = iter(leaves)
        positional = [self._spec(value, remaining) for value in args]
        return positional, {name: self._spec(value, remaining) for name, value in kwargs.items()}

    def _spec(self, value: Any, leaves: Any) -> Any:
        if isinstance(value, Mapping):
            found = {key: self._spec(value[key], leaves) for key in sorted(value)}
            return self._tf.nest.pack_sequence_as(value, self._tf.nest.flatten(found)) if found else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[self._spec(item, leaves) for item in value])
        if isinstance(value, tuple | list):
            return type(value)([self._spec(item, leaves) for item in value])
        leaf = next(leaves)
        if leaf.dtype is None:
            return leaf.static if _is_composite(leaf.static) else value
        return self._tf.TensorSpec(leaf.shape, leaf.dtype)

    def cast(self, given: Any, spec: Any) -> Any:
        """Return arguments converted for a trace with `spec`: Python numbers, lists and arrays become tensors.

        A value that does not fit is returned unchanged; its type and shape are refused later.
        """
        if isinstance(spec, self._tf.TensorSpec) and not isinstance(given, self._tf.Tensor | self._tf.Variable):
            try:
                return self._tf.convert_to_tensor(given, spec.dtype)
            except (TypeError, ValueError):
                return given
        if isinstance(spec, Mapping) and isinstance(given, Mapping) and spec.keys() == given.keys():
            like: Any = type(given)
            return like({key: self.cast(given[key], spec[key]) for key in given}) if type(given) is dict else given
        if isinstance(spec, tuple | list) and type(spec) is type(given) and len(spec) == len(given):
            items = [self.cast(item, part) for item, part in zip(given, spec, strict=True)]
            return type(given)(*items) if hasattr(given, "_fields") else type(given)(items)
        return given

    def paths(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Return the path of every leaf, as users write it in `batch_inputs`."""
        names = list(self._signature.parameters) if self._signature is not None else []
        names += [f"arg{i}" for i in range(len(names), len(args))]
        found: list[str] = []
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            found += leaf_paths(value, name)
        return found

    def relaxed(self, leaves: Sequence[ArgumentLeaf], paths: Sequence[str]) -> list[ArgumentLeaf]:
        """Return leaves with open batch axes."""
        return [_relax(leaf, self.axis(path, leaf)) for leaf, path in zip(leaves, paths, strict=True)]

    def opened(self, leaves: Sequence[ArgumentLeaf], axes: Mapping[int, int]) -> list[ArgumentLeaf]:
        """Return leaves that are open along some axes.

        Args:
            axes: one by the index of each tensor among those of all leaves.
        """
        found, at = [], 0
        for leaf in leaves:
            is_composite = leaf.dtype is None and hasattr(leaf.static, "_to_components")
            found.append(_relax(leaf, axes.get(at)) if leaf.dtype is not None else leaf)
            at += len(self._tf.nest.flatten(leaf.static, expand_composites=True)) if is_composite else 0
            at += leaf.dtype is not None
        return found

    def axis(self, path: str, leaf: ArgumentLeaf) -> int | None:
        """Return the batch axis of an argument; None if it has none."""
        if not leaf.shape:
            return None
        named = [name for name in self._batch or () if path == name or path.startswith(f"{name}/")]
        if self._batch is not None and named:
            return self._batch[max(named, key=len)]
        return 0 if only_excludes(self._batch) else None


def _signature(function: Any) -> inspect.Signature | None:
    python = getattr(function, "python_function", function)
    try:
        signature = inspect.signature(python)
    except (TypeError, ValueError):
        return None
    if getattr(function, "__self__", None) is not None and "self" in signature.parameters:
        return signature.replace(parameters=list(signature.parameters.values())[1:])
    return signature


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def leaf_paths(value: Any, path: str) -> list[str]:
    """Return the paths of all leaves of a nested value, prefixed with its path."""
    if isinstance(value, Mapping):
        return [p for key in sorted(value) for p in leaf_paths(value[key], f"{path}/{key}")]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [p for key, item in zip(value._fields, value, strict=True) for p in leaf_paths(item, f"{path}/{key}")]
    if isinstance(value, tuple | list):
        return [p for index, item in enumerate(value) for p in leaf_paths(item, f"{path}/{index}")]
    return [path]


def _relax(leaf: ArgumentLeaf, axis: int | None) -> ArgumentLeaf:
    if axis is None or not leaf.shape or not -len(leaf.shape) <= axis < len(leaf.shape):
        return leaf
    shape = list(leaf.shape)
    shape[axis] = None
    return leaf._replace(shape=tuple(shape))


def _is_composite(static: Any) -> bool:
    """Return whether a leaf is the spec of a sparse or ragged tensor, or of indexed slices: a spec with a shape."""
    return type(static).__name__ in COMPOSITES


def accepts(traced: Sequence[ArgumentLeaf], given: Sequence[ArgumentLeaf]) -> bool:
    """Return whether a trace for `traced` leaves can be called with `given` ones."""
    return len(traced) == len(given) and all(map(_accepts, traced, given))


def _accepts(traced: ArgumentLeaf, given: ArgumentLeaf) -> bool:
    if traced.dtype is None and given.dtype is None and traced.static != given.static:
        spec: Any = given.static
        return _is_composite(traced.static) and bool(spec.is_subtype_of(traced.static))
    if traced.dtype != given.dtype or traced.static != given.static:
        return False
    if traced.shape is None or given.shape is None:
        return traced.shape is None
    if len(traced.shape) != len(given.shape):
        return False
    return all(a is None or a == b for a, b in zip(traced.shape, given.shape, strict=True))


def common(traced: Sequence[ArgumentLeaf], given: Sequence[ArgumentLeaf]) -> list[ArgumentLeaf] | None:
    """Return leaves that accept both, with axes of different sizes open; None if they differ otherwise."""
    if len(traced) != len(given):
        return None
    found = []
    for a, b in zip(traced, given, strict=True):
        if _is_composite(a.static) and _is_composite(b.static):
            spec: Any = a.static
            both = spec.most_specific_common_supertype([b.static])
            if both is None:
                return None
            found.append(a._replace(static=both))
            continue
        if a.dtype != b.dtype or a.static != b.static or (a.shape is None) != (b.shape is None):
            return None
        if a.shape is None or b.shape is None:
            found.append(a)
            continue
        if len(a.shape) != len(b.shape):
            return None
        found.append(a._replace(shape=tuple(x if x == y else None for x, y in zip(a.shape, b.shape, strict=True))))
    return found
