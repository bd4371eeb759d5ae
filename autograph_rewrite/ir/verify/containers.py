"""Invariant of tensor arrays and stacks: who reads one on each replica finds what each replica has put into its own.

    TensorArrayV3 each ◄── TensorArrayWriteV3 once (of the first replica's), TensorArrayGatherV3 each      a fault

Nobody would miss a value: an array that nothing was put into gives zeros.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.variable_ops import handle_node

_KINDS = {
    "write": re.compile(r"TensorArray(Write|Scatter|Split)V\d|StackPush(V2)?"),
    "read": re.compile(r"TensorArray(Read|Gather|Concat)V\d|StackPop(V2)?"),
    "gradients": re.compile(r"TensorArrayGradV\d"),
}

Container = tuple[Node, bytes]
"""What makes it, and whose gradients it holds, if any."""


@functools.cache
def _kind(op: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(op)), "")


def unwritten_reads(nodes: Iterable[Node]) -> Iterator[tuple[Node, str]]:
    """Yield the reads of containers that are written less often than they are read, and what is wrong.

    Args:
        nodes: of a folded graph.
    """
    written: dict[Container, Node] = {}
    reads: list[Node] = []
    for node in nodes:
        kind = _kind(node.op)
        if kind == "write":
            before = written.setdefault(_container(node), node)
            if node.span.is_rarer_than(before.span):
                written[_container(node)] = node
        elif kind == "read":
            reads.append(node)
    for read in reads:
        write = written.get(_container(read))
        if write is not None and write.span.is_rarer_than(read.span):
            often, rarely = read.span.word, write.span.word
            yield read, f"'{read.name}' reads {often} what '{write.name}' puts into a container {rarely}"


def _container(node: Node) -> Container:
    maker, source = handle_node(node.inputs[0]), b""
    while _kind(maker.op) == "gradients":
        maker, source = handle_node(maker.inputs[0]), maker.attr("source")
    return maker, source
