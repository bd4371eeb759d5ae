"""Invariant of tensor arrays and stacks: who reads one on each replica finds what each replica has put into its own.

    TensorArrayV3 each ◄── TensorArrayWriteV3 once (of the first replica's), TensorArrayGatherV3 each      a fault

Nobody would miss a value: an array that nothing was put into gives zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.ops.traits import has, ops_with

_WRITES, _READS = ops_with("container_writes"), ops_with("container_reads")
Container = tuple[Node, bytes]
"""What makes it, and whose gradients it holds, if any."""


def unwritten_reads(nodes: Iterable[Node]) -> Iterator[tuple[Node, str]]:
    """Yield the reads of containers that are written less often than they are read, and what is wrong.

    Args:
        nodes: of a folded graph.
    """
    written: dict[Container, Node] = {}
    reads: list[Node] = []
    for node in nodes:
        if node.op in _WRITES:
            before = written.setdefault(_container(node), node)
            if node.span.is_rarer_than(before.span):
                written[_container(node)] = node
        elif node.op in _READS:
            reads.append(node)
    for read in reads:
        write = written.get(_container(read))
        if write is not None and write.span.is_rarer_than(read.span):
            often, rarely = read.span.word, write.span.word
            yield read, f"'{read.name}' reads {often} what '{write.name}' puts into a container {rarely}"


def _container(node: Node) -> Container:
    maker, source = handle_node(node.inputs[0]), b""
    while has(maker.op, "container_gradients"):
        maker, source = handle_node(maker.inputs[0]), maker.attr("source")
    return maker, source
