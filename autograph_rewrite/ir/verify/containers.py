"""Invariant of tensor arrays and stacks: who reads one on each replica finds what each replica has put into its own.

    TensorArrayV3 each ◄── TensorArrayWriteV3 once (of the first replica's), TensorArrayGatherV3 each      a fault

Nobody would miss a value: an array that nothing was put into gives zeros.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.op_traits import ENTERS, MERGES, SWITCHES

_WRITES = re.compile(r"TensorArray(Write|Scatter|Split)V\d|StackPush(V2)?")
_READS = re.compile(r"TensorArray(Read|Gather|Concat)V\d|StackPop(V2)?")
_GRADIENTS = re.compile(r"TensorArrayGradV\d")
_HANDS_ON = ENTERS | MERGES | SWITCHES | {"Identity"}

Container = tuple[Node, bytes]
"""What makes it, and whose gradients it holds, if any."""


@functools.cache
def _is(kind: re.Pattern[str], op: str) -> bool:
    return kind.fullmatch(op) is not None


def unwritten_reads(nodes: Iterable[Node]) -> Iterator[tuple[Node, str]]:
    """Yield the reads of containers that are written less often than they are read, and what is wrong.

    Args:
        nodes: of a folded graph.
    """
    written: dict[Container, Node] = {}
    reads: list[Node] = []
    for node in nodes:
        if _is(_WRITES, node.op):
            before = written.setdefault(_container(node), node)
            if node.span.is_rarer_than(before.span):
                written[_container(node)] = node
        elif _is(_READS, node.op):
            reads.append(node)
    for read in reads:
        write = written.get(_container(read))
        if write is not None and write.span.is_rarer_than(read.span):
            often, rarely = read.span.word, write.span.word
            yield read, f"'{read.name}' reads {often} what '{write.name}' puts into a container {rarely}"


def _container(node: Node) -> Container:
    maker, source = node.inputs[0].node, b""
    while maker.inputs and (maker.op in _HANDS_ON or _GRADIENTS.fullmatch(maker.op)):
        if _GRADIENTS.fullmatch(maker.op):
            source = maker.attr("source")
        maker = maker.inputs[0].node
    return maker, source
