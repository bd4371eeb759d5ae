"""FunctionBinding: the live objects of a traced function, which its graph knows only as placeholders."""

from __future__ import annotations

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
        concrete: TensorFlow's ConcreteFunction.
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
