"""Call a function that was not traced: register its FunctionDef with TensorFlow, then run it by name.

Executing by name is how TensorFlow calls its own functions, at half the start-up cost of the public call op; the
modules for it are private, so where they are gone or different, the public way is taken.

Grappler is switched off for functions on CPUs: it took up to three quarters of the first step and never made a later
one faster. On accelerators it chooses layouts and stays on.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from autograph_rewrite import tf_private
from autograph_rewrite.ir.attr_inference import OWN_FUNCTIONS
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.dtypes import RESOURCE, VARIANT
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine import function_def
from autograph_rewrite.runtime.engine.function_def import EncodedFunction, function_name
from autograph_rewrite.runtime.engine.native_loop import LoopedCall


def new_name(base: str) -> str:
    """Return a function name that nothing else has."""
    return f"{OWN_FUNCTIONS}{base}_{uuid.uuid4().hex[:12]}"


class Call:
    """A registered function. Call it with flat tensors, eagerly or while another function is traced.

    Args:
        function: the function; it stays registered as long as this object lives.
        on_cpu: whether all of it runs on CPUs.
    """

    def __init__(self, function: EncodedFunction, *, on_cpu: bool = True) -> None:
        self._tf = tensorflow()
        self._name = function.name
        self._types = [self._tf.as_dtype(t) for t in function.output_types]
        self._private = tf_private.executor()
        self._config = _config(self._tf, self._private, on_cpu)
        self._keep = _register(self._tf, self._private, function)

    @property
    def types(self) -> list[Any]:
        """The types of the results."""
        return self._types

    @functools.cached_property
    def looped(self) -> LoopedCall:
        """What makes several calls in one loop."""
        return LoopedCall(self.add_op, self._types, self._execute if self._private is not None else None)

    def __call__(self, inputs: Sequence[Any], cancellation: Any = None) -> list[Any]:
        """Run the function and return its results.

        Args:
            inputs: one tensor per argument.
            cancellation: what `cancellation_manager` gave; cancelling it ends the call.
        """
        if self._private is None or not self._tf.executing_eagerly():
            return self.add_op(inputs)[0]
        return self._execute(self._name, len(self._types), inputs, cancellation)

    def _execute(self, name: str, count: int, inputs: Sequence[Any], cancellation: Any) -> list[Any]:
        """Run a registered function eagerly."""
        assert self._private is not None
        context, execute = self._private
        attrs = ("executor_type", "", "config_proto", self._config)
        if cancellation is None:
            results: list[Any] = execute.execute(name, count, list(inputs), attrs, context.context())
        else:
            results = execute.execute_with_cancellation(
                name, count, list(inputs), attrs, context.context(), cancellation
            )
        return results

    def add_op(self, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Add a call to the graph under construction; return its results, and the operation."""
        results = self._tf.raw_ops.StatefulPartitionedCall(
            args=list(inputs), Tout=self._types, f=self._name, config_proto=self._config
        )
        if self._tf.executing_eagerly():
            return list(results) if self._types else [], None
        return (list(results), results[0].op) if self._types else ([], results)


def _config(tf: Any, private: tuple[Any, Any] | None, on_cpu: bool) -> bytes:
    """Return the encoded ConfigProto of the calls: the process's own, with or without Grappler."""
    config = tf.compat.v1.ConfigProto()
    if private is not None:
        config.ParseFromString(private[0].context().function_call_options.config_proto_serialized)
    if on_cpu:
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    encoded: bytes = config.SerializeToString()
    return encoded


def _register(tf: Any, private: tuple[Any, Any] | None, function: EncodedFunction) -> Any:
    """Make TensorFlow know a function and what it refers to; return what must be kept for that."""
    if private is None:
        graph = tf.compat.v1.GraphDef()
        for definition in (*function.library, function.definition):
            graph.library.function.add().ParseFromString(definition)
        # Wrapping an imported graph registers the functions in its library.
        return tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(graph, name=""), [])
    context = private[0].context()
    context.ensure_initialized()
    for definition in function.library:  # usually traced in this process, so known
        if not context.has_function(function_name(definition)):
            context.add_function_def(_parsed(tf, definition))
    context.add_function_def(_parsed(tf, function.definition))
    return _Registration(context, function.name)


def _parsed(tf: Any, definition: bytes) -> Any:
    """Return a FunctionDef as TensorFlow's message."""
    parsed = tf.compat.v1.GraphDef().library.function.add()
    parsed.ParseFromString(definition)
    return parsed


class _Registration:
    """Removes a function when nobody can call it any more."""

    def __init__(self, context: Any, name: str) -> None:
        self._remove: Callable[[str], None] = context.remove_function
        self._name = name

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # when the interpreter exits, TensorFlow may be gone already
            self._remove(self._name)


def on_cpu(devices: Iterable[str]) -> bool:
    """Return whether all of the devices are CPUs."""
    return all("CPU" in device.upper() for device in devices)


# Reads many variables in one call: one call costs less than one for each.
#
#     handles on a CPU ──► one variant, packed once ──► function ──► values, and stacks of values
#     other handles    ─────────────────────────────►
#
# An argument costs a call about half a microsecond, so those of a CPU are given as one.


class Reader:
    """Reads the same variables again and again.

    Args:
        handles: of the variables.
        types: of the variables, as TensorFlow's enum.
        stacks: which variables (by position) are read as the rows of one tensor: of one type, shape and CPU each.
    """

    def __init__(self, handles: Sequence[Any], types: Sequence[int], stacks: Sequence[Sequence[int]] = ()) -> None:
        stacked = {index for rows in stacks for index in rows}
        single = [index for index in range(len(handles)) if index not in stacked]
        by_device: dict[str, list[int]] = {}
        for index, handle in enumerate(handles):
            by_device.setdefault(handle.device if "CPU" in handle.device else "", []).append(index)
        elsewhere = by_device.pop("", [])
        self._arguments: list[Any] = []
        nodes: list[bytes] = []
        values: dict[int, str] = {}
        for number, (device, those) in enumerate(by_device.items()):
            self._arguments.append(_packed([handles[index] for index in those], device))
            nodes.append(_unpacking(f"get{number}", f"a{number}", len(those), device))
            handed = [(f"get{number}:components:{at}", types[index]) for at, index in enumerate(those)]
            node, found = function_def.read_together(f"read{number}", handed, device=device)
            nodes.append(node)
            values |= dict(zip(those, found, strict=True))
        first = len(self._arguments)
        self._arguments += [handles[index] for index in elsewhere]
        own = [(f"a{first + at}", types[index]) for at, index in enumerate(elsewhere)]
        more, found = function_def.read_each("each", own)
        values |= dict(zip(elsewhere, found, strict=True))
        results = [values[index] for index in single]
        for number, rows in enumerate(stacks):
            which = [values[index] for index in rows]
            node, result = function_def.stack(f"stack{number}", which, types[rows[0]], handles[rows[0]].device)
            nodes.append(node)
            results.append(result)
        given = [VARIANT] * first + [RESOURCE] * len(elsewhere)
        made = [*(types[index] for index in single), *(types[rows[0]] for rows in stacks)]
        name = new_name("read")
        self._call = Call(function_def.of_nodes(name, given, [*nodes, *more], results, made))

    def __call__(self) -> list[Any]:
        """Return the values of those that are read by themselves, in order, and then the stacks."""
        return self._call(self._arguments)


def _packed(handles: Sequence[Any], device: str) -> Any:
    """Return one tensor that holds handles."""
    tf = tensorflow()
    with tf.device(device):
        return tf.raw_ops.OptionalFromValue(components=list(handles))


def _unpacking(name: str, argument: str, count: int, device: str) -> bytes:
    attrs = {
        "output_types": encode("list(type)", [RESOURCE] * count),
        "output_shapes": encode("list(shape)", [()] * count),
    }
    return function_def.encoded(name, "OptionalGetValue", [argument], attrs, device)
