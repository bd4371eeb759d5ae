"""What a graph itself says of its tensors: `ar.split` and the like, and XLA's sharding annotations, in one form.

    w ──► ReadVariableOp ──► autograph_sharding/split-1x2        'w': split (1, 2), said in model.py:12
    h ──► Identity(_XlaSharding: tiles [1, 2])                   'h': split (1, 2), said by XlaSharding 'h'
    VarHandleOp(_XlaSharding: device 1)                          'v': device 1

What is said of a variable that is read, or of its handle, is said of the variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autograph_rewrite.config.split_parts import OPEN
from autograph_rewrite.errors import GraphError
from autograph_rewrite.load.op_sharding import MAXIMAL, OTHER, REPLICATED, TUPLE, OpSharding, read_op_sharding
from autograph_rewrite.load.sharding_marks import OPEN_DIMS, PLACE, XLA_SHARDING, mark_of
from autograph_rewrite.plan.parts.graph_digest import ItemLike, NodeLike


@dataclass(frozen=True)
class Annotation:
    """What a graph says of a variable or a tensor.

    Attributes:
        name: of the variable, else of the tensor that is cut for its readers.
        subject: what it is about: annotations of one subject must agree.
        said: where: the line of the program, or the node.
        split: parts of each dimension, as in `config.split_parts`; empty: the whole is on every device.
        device: the logical device that makes it; -1: several.
        tiles: of XLA's, the device of each tile, and on how many devices each tile is.
    """

    name: str
    subject: str
    said: str
    split: tuple[int, ...] = ()
    device: int = -1
    tiles: tuple[tuple[int, ...], int] = ((), 1)


def annotations_of(item: ItemLike) -> Iterator[Annotation]:
    """Yield what a graph says of its tensors, in its order.

    Args:
        item: normalised.
    """
    variables = {variable.handle: name for name, variable in item.variables.items()}
    nodes = item.graph.nodes
    for name, node in nodes.items():
        mark = mark_of(name) if node.op == "Identity" else None
        said = node.attr(XLA_SHARDING)
        if mark is None and said is None:
            continue
        variable = _variable(node, nodes, variables)
        if mark is not None:
            place = node.attr(PLACE, b"").decode() or f"'{name}'"
            yield Annotation(variable or name, variable or _value(node.inputs[0].name), place, *mark)
        elif said is not None:
            yield from _said_to_xla(node, read_op_sharding(said), variable)


def _said_to_xla(node: NodeLike, sharding: OpSharding, variable: str | None) -> Iterator[Annotation]:
    """Yield what XLA is told of the outputs of a node; nothing where that is that it is to find out."""
    outputs = range(1 if variable is not None else len(node.output_dtypes))
    for index in outputs:
        one = sharding.of(index)
        if one.type not in (REPLICATED, MAXIMAL, OTHER) or (sharding.type == TUPLE and one.type == REPLICATED):
            continue  # of an op with several outputs, those that nobody spoke of are REPLICATED
        name = variable or _value(f"{node.name}:{index}")
        said = f"{XLA_SHARDING} of {node.op} '{node.name}'"
        if one.type == MAXIMAL:
            if not one.devices:
                raise GraphError("the sharding names no device", node=node)
            yield Annotation(name, name, said, device=one.devices[0])
            continue
        tiles = [OPEN if dim in node.attr(OPEN_DIMS, ()) else tiles for dim, tiles in enumerate(one.tiles)]
        split = tuple(tiles) if any(count != 1 for count in tiles) else ()
        yield Annotation(name, name, said, split, tiles=(one.devices, one.copies))


def _variable(node: NodeLike, nodes: Mapping[str, NodeLike], variables: Mapping[str, str]) -> str | None:
    """Return the variable that a node reads, hands on as it was read, or is; None where that is none."""
    if node.name in variables:
        return variables[node.name]
    if node.op == "Identity" and node.inputs:
        read = nodes.get(node.inputs[0].name.partition(":")[0])
        node = read if read is not None else node
    if node.op != "ReadVariableOp":
        return None
    return variables.get(node.inputs[0].name.partition(":")[0])


def _value(name: str) -> str:
    return name.removesuffix(":0")
