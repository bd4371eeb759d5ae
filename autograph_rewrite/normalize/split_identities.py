"""Split each IdentityN into one Identity per value: TensorFlow does not order them either.

    before   IdentityN(da, db) ──► apply(a, :0), apply(b, :1)         apply(a) seems to wait for db
    after    Identity(da) ──► apply(a)      Identity(db) ──► apply(b)

Keras' optimizers hand all gradients on together. Where a control edge stands beside such a path, TensorFlow 2.21 first
drops the edge, as the path says the same, and then splits the IdentityN: an update may overtake a read.
"""

from __future__ import annotations

from collections.abc import Collection

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.types.attrs import encode

SHAPES = "_output_shapes"


def separate_identities(graph: Graph, declared: Collection[str]) -> None:
    """Replace every IdentityN of several values by an Identity of each; that of the first has its name.

    Args:
        graph: edited.
        declared: names that are read from outside: an IdentityN with such a name stays, and reads the Identities.
    """
    for node in [node for node in graph if node.op == "IdentityN" and len(node.inputs) > 1]:
        values = [_identity(graph, node, index) for index in range(len(node.inputs))]
        for old, new in zip(node.outputs, values, strict=True):
            old.replace_all_uses_with(new)
        for user in node.control_users:
            user.remove_control(node)
            for value in values:
                user.add_control(value.node)
        if node.name in declared:
            node.set_inputs(values)
        else:
            graph.erase(node)
            take_name(graph, values[0].node, node.name)


def _identity(graph: Graph, node: Node, index: int) -> Value:
    name = f"{node.name}/{index}"
    value = node.inputs[index]
    made = graph.add("Identity", [value], name=name, device=node.device, controls=node.controls, origin=node)
    for key, raw in _shape(node, index).items():
        made.set_raw_attr(key, raw)
    return made.output()


def _shape(node: Node, index: int) -> dict[str, bytes]:
    """Return the attribute that states the shape of one output, if the node states those of all."""
    shapes = node.attr(SHAPES)
    return {SHAPES: encode("list(shape)", [shapes[index]])} if shapes is not None and index < len(shapes) else {}
