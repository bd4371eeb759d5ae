"""Captures of a traced function, which its graph has as placeholders: live objects, or values saved to a file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Capture:
    """A value from outside that a function uses.

    Attributes:
        node: the placeholder that stands for it.
        value: the eager tensor: a variable's or another resource's handle, or a large constant.
        variable: the tf.Variable that it is the handle of, else None.
        name: the variable's public name, else None.
    """

    node: str
    value: Any
    variable: Any = None
    name: str | None = None


@dataclass(frozen=True, eq=False)
class FunctionBinding:
    """How to call a graph that was traced from a function.

    Attributes:
        concrete: TensorFlow's ConcreteFunction; None when it was restored from a file.
        captures: in capture order.
        structured_input_signature: `(args, kwargs)` of specs and Python values.
        structured_outputs: the nested result, tensors of the traced graph.
        inputs: placeholder node per flat argument, in order.
        outputs: tensor name per flat result, in order.
    """

    concrete: Any
    captures: tuple[Capture, ...]
    structured_input_signature: Any
    structured_outputs: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    owner: Any = None  # keeps alive what the captured handles belong to
    first: Any = None  # another ConcreteFunction of the program's own, traced before, with captures of its own


@dataclass(frozen=True, eq=False)
class SavedCapture:
    """What a capture held when its item was saved.

    Attributes:
        node: the placeholder that stands for it.
        value: its value, as a numpy array.
        dtype: TensorFlow's name of the element type.
        name: the variable's public name; None for a constant.
    """

    node: str
    value: Any
    dtype: str
    name: str | None = None

    def __eq__(self, other: object) -> bool:
        """Compare by value."""
        if not isinstance(other, SavedCapture):
            return NotImplemented
        if (self.node, self.dtype, self.name) != (other.node, other.dtype, other.name):
            return False
        return bool(self.value.shape == other.value.shape and self.value.tolist() == other.value.tolist())

    __hash__ = None  # type: ignore[assignment]  # arrays have none


@dataclass(frozen=True)
class SavedBinding:
    """A function's captures by value: enough to make it run again, on variables of its own.

    Attributes:
        captures: in capture order.
        inputs: placeholder node per flat argument, in order.
        outputs: tensor name per flat result, in order.
    """

    captures: tuple[SavedCapture, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def restore(self, trainable: Collection[str] = ()) -> FunctionBinding:
        """Return a live binding with a new tf.Variable per captured variable (this imports TensorFlow)."""
        import tensorflow as tf

        captures = []
        for saved in self.captures:
            if saved.name is None:
                captures.append(Capture(saved.node, tf.constant(saved.value, saved.dtype)))
                continue
            variable = tf.Variable(saved.value, dtype=saved.dtype, name=saved.name, trainable=saved.name in trainable)
            captures.append(Capture(saved.node, variable.handle, variable, saved.name))
        return FunctionBinding(None, tuple(captures), None, None, self.inputs, self.outputs)
