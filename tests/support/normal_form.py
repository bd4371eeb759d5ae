"""Run an item's graph as it is and in normal form, on the same data, and compare: results, then variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise, roots
from autograph_rewrite.ops.traits import ops_with

v1 = tf.compat.v1


def ops(item: GraphItem) -> set[str]:
    """Return the op types of a graph."""
    return {node.op for node in item.graph}


def imported(item: GraphItem) -> Any:
    """Return the graph as a tf.Graph: TensorFlow's own import, with its checks."""
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(_without_shapes(item), name="")
    return graph


def _without_shapes(item: GraphItem) -> Any:
    message = item.graph_def
    for node in message.node:
        node.attr.pop("_output_shapes", None)
    return message


def session(graph: Any) -> Any:
    return v1.Session(graph=graph, config=v1.ConfigProto(allow_soft_placement=False))


def run_steps(
    item: GraphItem, feeds: Sequence[Mapping[str, Any]], fetches: Sequence[str] = ()
) -> tuple[list[Any], dict[str, Any]]:
    """Initialise, run targets and outputs once per feed; return the outputs and the final variables."""
    graph = imported(item)
    with graph.as_default():
        reads = {name: _value(graph, variable) for name, variable in item.variables.items()}
    wanted = [info.tensor for info in item.outputs.values()] + list(fetches)
    results = []
    with session(graph) as running:
        if item.init_op is not None:
            running.run(item.init_op)
        for feed in feeds:
            results.append(running.run([wanted, list(item.targets)], feed)[0])
        return results, running.run(reads)


def _value(graph: Any, variable: Any) -> Any:
    handle = graph.get_operation_by_name(variable.handle)
    if handle.type != "VarHandleOp":
        return handle.outputs[0]
    return tf.raw_ops.ReadVariableOp(resource=handle.outputs[0], dtype=variable.dtype)


def assert_same_steps(item: GraphItem, feeds: Sequence[Mapping[str, Any]], fetches: Sequence[str] = ()) -> GraphItem:
    """Check that normal form changes no result and no variable; return the normal form."""
    before = item.graph_bytes
    normal = normalise(item)
    assert item.graph_bytes == before, "normalise changed its input"
    expected, found = run_steps(item, feeds, fetches), run_steps(normal, feeds, fetches)
    _assert_equal(expected, found)
    return normal


def assert_same_calls(function: Callable[..., Any], *arguments: Any, steps: int = 3) -> GraphItem:
    """Check a traced function the same way, in eager mode; return the normal form."""
    arrays = [np.asarray(argument) for argument in arguments]
    specs = [tf.TensorSpec([None, *a.shape[1:]] if a.ndim else [], a.dtype) for a in arrays]
    item = GraphItem.from_function(function, *specs)
    normal = normalise(item)
    assert not ops_with("functional") & {node.op for node in ancestors(roots(normal, normal.graph))}
    tensors = [tf.constant(array) for array in arrays]
    expected = _called(item, lambda: tf.nest.flatten(item.binding.concrete(*tensors)), steps)
    run = _wrapped(normal, arrays)
    found = _called(item, lambda: run(*tensors), steps)
    _assert_equal(expected, found)
    return normal


def _called(item: GraphItem, step: Callable[[], Any], steps: int) -> tuple[list[Any], list[Any]]:
    """Call a step a few times; return its results and the variables after it, and put the variables back."""
    variables = [capture.variable for capture in item.binding.captures if capture.variable is not None]
    start = [variable.numpy() for variable in variables]
    results = [[tensor.numpy() for tensor in step()] for _ in range(steps)]
    end = [variable.numpy() for variable in variables]
    for variable, value in zip(variables, start, strict=True):
        variable.assign(value)
    return results, end


def _wrapped(item: GraphItem, arrays: Sequence[Any]) -> Any:
    """Return a graph as a function; without automatic control dependencies, which do not know v1 control flow."""
    binding, message = item.binding, _without_shapes(item)

    def run(*arguments: Any) -> list[Any]:
        graph = v1.get_default_graph()
        given = {f"{name}:0": value for name, value in zip(binding.inputs, arguments, strict=True)}
        given |= {f"{capture.node}:0": graph.capture(capture.value) for capture in binding.captures}
        names = [*binding.outputs, *item.targets]
        found = tf.import_graph_def(message, input_map=given, return_elements=names, name="")
        count = len(binding.outputs)
        with tf.control_dependencies(found[count:]):
            return [tf.identity(tensor) for tensor in found[:count]]

    return v1.wrap_function(run, [tf.TensorSpec(array.shape, array.dtype) for array in arrays])


def _assert_equal(expected: Any, found: Any) -> None:
    for left, right in zip(tf.nest.flatten(expected), tf.nest.flatten(found), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-12, atol=1e-13)
