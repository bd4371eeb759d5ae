"""Which tensors cross between the memory of an accelerator and that of its host in each step.

    x (fed) ═════► MatMul @GPU:0                    to the device
    loss @GPU:0 ═════► fetch                        to the host
    dims: int32 ─────► Reshape @GPU:0               host memory on both ends: nothing moves
    Prod: int32 @GPU:0 ═════► Reshape's shape       a size that was computed on the device

A tensor moves once to each memory where it is read, as TensorFlow sends it. What goes from one accelerator to another,
or to another process, is communication, and not counted here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from autograph_rewrite.analysis.accelerator.device_placement import Placed, host_of, is_accelerator
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.ir.types.kernels import ALWAYS_ON_HOST


@dataclass(frozen=True)
class Crossing:
    """A tensor that moves between a host and an accelerator.

    Attributes:
        value: what moves.
        device: the accelerator at one end.
        to_host: which way it goes.
        readers: who reads it there; none: the program that runs the step.
    """

    value: Value
    device: str
    to_host: bool
    readers: tuple[Node, ...]


def crossings(
    step: Collection[Node], placed: Mapping[Node, Placed], fed: Collection[Node], fetched: Iterable[Value]
) -> list[Crossing]:
    """Return what crosses in each step, in the order of the nodes.

    Args:
        step: the nodes that a step runs.
        placed: where they do.
        fed: inputs, which the program hands over in host memory.
        fetched: what it wants back there.
    """
    wanted = set(fetched)
    found: dict[tuple[Value, str], list[Node]] = {}
    for node in step:
        for value in node.read_outputs:
            for reader, target in _readers(value, step, placed, value in wanted):
                source = "" if node in fed else memory_of(value, placed[node])
                source = source or host_of(target or placed[node].device)
                target = target or host_of(source)
                if _crosses(source, target):
                    found.setdefault((value, target), []).extend([reader] if reader is not None else [])
    return [_crossing(value, target, readers, placed) for (value, target), readers in found.items()]


def _crossing(value: Value, target: str, readers: list[Node], placed: Mapping[Node, Placed]) -> Crossing:
    to_host = not is_accelerator(target)
    return Crossing(value, placed[value.node].device if to_host else target, to_host, tuple(readers))


def _readers(
    value: Value, step: Collection[Node], placed: Mapping[Node, Placed], fetched: bool
) -> Iterator[tuple[Node | None, str]]:
    """Yield who reads a value, and in which memory; empty: in that of the host beside it."""
    if value.dtype in ALWAYS_ON_HOST or value.dtype > dtypes.REF_OFFSET:
        return
    for use in value.uses:
        if use.node in step:
            yield use.node, operand_memory(use.index, placed[use.node])
    if fetched:
        yield None, ""


def memory_of(value: Value, placed: Placed) -> str:
    """Return the memory that a value is in, by the name of its device; of the host's, that of the CPU."""
    kernel = placed.kernel
    return placed.device if kernel is not None and not kernel.outputs[value.index] else host_of(placed.device)


def operand_memory(index: int, placed: Placed) -> str:
    """Return the memory in which a placed node wants its operand of some index."""
    kernel = placed.kernel
    return placed.device if kernel is not None and not kernel.inputs[index] else host_of(placed.device)


def _crosses(source: str, target: str) -> bool:
    same_process = device_specs.process(source) == device_specs.process(target)
    return same_process and is_accelerator(source) != is_accelerator(target)
