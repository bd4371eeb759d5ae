"""Find the memory of a pipeline by liveness: the tensors that each part of a micro-batch makes, their readers, devices.

    activation   made, or received, for F@s and read by B@s: alive from the start of one to the end of the other
    sum          a gradient that each B@s adds to: alive from the first of them to the update
    sent         made by one device and read by another: alive here until it has been sent, there from then on
    inside       made and read within one part: the most of it that is alive at a time, node by node

All micro-batches are assumed to be as large as the first, so each value is analysed once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autograph_rewrite.analysis.liveness import Lives
from autograph_rewrite.cost.pipeline.parts import AFTER, BEFORE, Part, Staged
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD

_ALIGNED = 64
"""TensorFlow aligns the memory of a tensor to a multiple of this many bytes."""


class LiveTensor(NamedTuple):
    """Memory that outlives the part that made it.

    Attributes:
        device: the number of the device, within a replica, that holds it.
        maker: the part that made it, here or elsewhere.
        readers: the parts on this device that read it.
        sent_to: the devices that it is sent to from here.
        is_sum: all micro-batches add to this one tensor.
    """

    device: int
    maker: Part
    readers: frozenset[Part]
    sent_to: frozenset[int] = frozenset()
    is_sum: bool = False

    @property
    def activation_of(self) -> int | None:
        """The stage whose forward part keeps this for its backward part; None if it is no activation."""
        forward = {stage for kind, stage in (self.maker, *self.readers) if kind == FORWARD}
        stages = sorted(forward & {stage for kind, stage in self.readers if kind == BACKWARD})
        return stages[0] if stages and self.maker[0] == FORWARD and not self.is_sum else None


@dataclass(frozen=True, repr=False)
class Footprint:
    """The memory of the parts of one micro-batch, in bytes.

    Attributes:
        held: of tensors that outlive a part.
        first: the peak inside a part, for the first micro-batch, whose gradients become the sums.
        later: the peak inside a part, for all other micro-batches.
        fed: by device, alive during the whole step: feeds, constants, outputs of BEFORE.
        crossing: sent from a part to another device, for each micro-batch; from BEFORE, once.
    """

    held: Mapping[LiveTensor, int]
    first: Mapping[Part, int]
    later: Mapping[Part, int]
    fed: Mapping[int, int]
    crossing: Mapping[tuple[Part, int], int]

    def sums(self, device: int) -> int:
        """Return the bytes of the gradients that are summed on a device."""
        return sum(nbytes for held, nbytes in self.held.items() if held.is_sum and held.device == device)


@dataclass(eq=False)
class _Made:
    """A value, or a block of one, of one micro-batch, with its producer and its last reader in each part."""

    nbytes: int
    part: Part
    at: int
    last: dict[Part, int] = field(default_factory=dict)
    is_sum: bool = False
    is_view: bool = False

    def on(self, staged: Staged, device: int) -> int:
        """Return the bytes that it takes on a device."""
        return 0 if self.is_view and staged.device(self.part) == device else self.nbytes


def footprint(staged: Staged, sizes: Sizes, *, interleaved: bool = False, copies: bool = True) -> Footprint:
    """Return the memory of one micro-batch.

    Args:
        interleaved: of M micro-batches, each has every M-th example.
        copies: each device has separate memory; else a value that another device reads is counted where it was made.
    """
    values, micro = _Values(staged, sizes, interleaved=interleaved), sizes.micro
    held: Counter[LiveTensor] = Counter()
    crossing: Counter[tuple[Part, int]] = Counter()
    fed: Counter[int] = Counter(values.fed)
    here: dict[Part, list[_Made]] = defaultdict(list)
    for made in values.made:
        own, by_device = staged.device(made.part), _by_device(staged, made)
        away = frozenset(device for device in by_device if device != own)
        if made.part[0] != BEFORE:
            for device in away:
                crossing[made.part, device] += made.nbytes
        if not copies:
            by_device, away = {own: frozenset(made.last)}, frozenset()
        if made.part[0] == BEFORE:
            fed[own] += made.on(staged, own) * micro
            for device in away:
                crossing[made.part, device] += made.nbytes * micro
                fed[device] += made.nbytes * micro
            continue
        here[made.part].append(made)
        readers = by_device.get(own, frozenset()) - {made.part}
        if made.is_sum:
            held[LiveTensor(own, made.part, readers | {(AFTER, made.part[1])}, is_sum=True)] += made.on(staged, own)
            away = frozenset()
        elif readers or away:
            held[LiveTensor(own, made.part, readers, away)] += made.on(staged, own)
        for device in away:
            held[LiveTensor(device, made.part, by_device[device])] += made.nbytes
        for part in made.last:
            if part != made.part and (copies or staged.device(part) == own):
                here[part].append(made)
    first = {part: _inside(staged, part, here[part], first=True, copies=copies) for part in staged.parts}
    later = {part: _inside(staged, part, here[part], first=False, copies=copies) for part in staged.parts}
    for (part, device), nbytes in values.shared.items():
        crossing[part, device] += nbytes
        fed[device] += nbytes
    return Footprint(dict(held), first, later, dict(fed), dict(crossing))


def _by_device(staged: Staged, made: _Made) -> dict[int, frozenset[Part]]:
    found = grouped((staged.device(part), part) for part in made.last)
    return {device: frozenset(parts) for device, parts in found.items()}


class _Values:
    """Collects the values that parts make and read; a view counts as the value that it shows."""

    def __init__(self, staged: Staged, sizes: Sizes, *, interleaved: bool) -> None:
        self._staged, self._sizes, self._interleaved = staged, sizes, interleaved
        self.made: list[_Made] = []
        self.fed: Counter[int] = Counter()
        self.shared: Counter[tuple[Part, int]] = Counter()  # made once and read on other devices
        self._of: dict[Value, _Made] = {}
        self._blocks: dict[Value, _Made] = {}
        self._sent: set[tuple[Value, int]] = set()
        self._bytes = {
            value: nbytes if staged.counts_here(value.node) else 0
            for counted in staged.counts.values()
            for value, nbytes in counted.made
        }
        places = {node: at for nodes in staged.parts.values() for at, node in enumerate(nodes)}
        for node in staged.folded.order:
            self._read(node, places[node])
            self._make(node, places[node])
        self._view_blocks()

    def _read(self, node: Node, at: int) -> None:
        part = self._staged.part_of[node]
        for value, target in zip(node.inputs, self._staged.counts[node].targets, strict=True):
            found = self._of.get(value)
            if node.span == EACH and value.node.span != EACH:
                if target is not None and target.startswith("split("):
                    found = self._block(value, part)
                else:
                    self._share(value, part)
                    continue
            if found is None or self._is_not_read(node, value):
                continue
            if value.node.span == EACH and node.span != EACH and self._is_sum(value):
                found.is_sum = True
            else:
                found.last[part] = max(at, found.last.get(part, -1))

    def _is_not_read(self, node: Node, value: Value) -> bool:
        """Return whether a node that runs once does not read the instances of a value in the micro-batches.

        A node in BEFORE runs before them, and a local size is replaced by that of the whole batch.
        """
        if node.span == EACH or value.node.span != EACH:
            return False
        is_early = self._staged.part_of[node][0] == BEFORE
        return is_early or self._staged.folded.state.source(value).placement.kind == "local"

    def _is_sum(self, value: Value) -> bool:
        return self._staged.folded.state.source(value).placement.op == "sum"

    def _block(self, value: Value, part: Part) -> _Made:
        """Return the block of a value; the part that reads it first cuts it out."""
        if value not in self._blocks:
            state, sizes = self._staged.folded.state, self._sizes
            nbytes = self._bytes.get(value, 0) // (sizes.micro * sizes.replicas)
            if value in state.whole_inputs:
                nbytes = sizes.nbytes(state.facts[value]) if self._staged.counts_here(value.node) else 0
                home = self._staged.device(self._staged.part_of[value.node])
                self.fed[home] += nbytes * sizes.micro * sizes.replicas
            self._blocks[value] = _Made(nbytes, part, -1)
            self.made.append(self._blocks[value])
        made = self._blocks[value]
        if self._staged.rank(part) < self._staged.rank(made.part):
            made.part = part
        return made

    def _view_blocks(self) -> None:
        """Mark the blocks that TensorFlow cuts out without copying: consecutive rows, if aligned."""
        whole = self._staged.folded.state.whole_inputs
        for value, made in self._blocks.items():
            near = self._staged.device(made.part) == self._staged.device(self._staged.part_of[value.node])
            made.is_view = near and whole.get(value) == 0 and not self._interleaved and made.nbytes % _ALIGNED == 0

    def _share(self, value: Value, part: Part) -> None:
        """Record that a value that is made once is read on another device."""
        home, device = self._staged.part_of.get(value.node), self._staged.device(part)
        if home is None or self._staged.device(home) == device or (value, device) in self._sent:
            return
        self._sent.add((value, device))
        if not has(value.node.op, "held"):
            self.shared[home, device] += self._bytes.get(value, 0)

    def _make(self, node: Node, at: int) -> None:
        counted, part = self._staged.counts[node], self._staged.part_of[node]
        if counted.hands_on:
            held = (value for value in node.inputs if value in self._of and not self._is_not_read(node, value))
            base = next((self._of[value] for value in held), None)
            if base is not None:
                self._of |= {value: base for value, _ in counted.made}
            return
        for value in (value for value, _ in counted.made):
            nbytes = self._bytes[value]
            if value in self._staged.folded.state.whole_inputs:
                continue  # counted with its blocks
            if node.span != EACH and (has(node.op, "held") or part[0] == BEFORE):
                # A value that only BEFORE reads is freed before the first activations, as a slot that is only decayed.
                parts = {self._staged.part_of.get(use.node, (BEFORE, 0))[0] for use in value.uses}
                if has(node.op, "held") or parts != {BEFORE}:
                    self.fed[self._staged.device(part)] += nbytes
                continue
            self._of[value] = made = _Made(nbytes, part, at)
            self.made.append(made)


def _inside(staged: Staged, part: Part, values: Iterable[_Made], *, first: bool, copies: bool) -> int:
    """Return the most bytes of these values that are alive at a time while a part runs, node by node."""
    rows: list[tuple[float, float, int]] = []
    new: dict[int, list[int]] = defaultdict(list)
    old: dict[int, list[int]] = defaultdict(list)
    for made in values:
        nbytes = made.on(staged, staged.device(part))
        end = _end(staged, made, part, first=first, copies=copies)
        if made.part == part:
            new[made.at].append(nbytes)
        if end is not None:
            old[end].append(nbytes)
        rows.append((made.at if made.part == part else -math.inf, math.inf if end is None else end + 0.5, nbytes))
    for at, node in enumerate(staged.parts[part]):
        if needed := _scratch(staged, node):
            rows.append((at, at + 0.5, needed))
        # its first result of the size of an operand that ends here reuses the operand's memory: count one of both
        if staged.counts[node].reuses and (taken := next((one for one in new[at] if one in old[at]), 0)):
            rows.append((at, at + 0.5, -taken))
    return Lives.of(rows).peak


def _scratch(staged: Staged, node: Node) -> int:
    """Return the bytes that a node needs while it runs, besides its outputs."""
    counted = staged.counts[node]
    return counted.scratch + counted.patches if staged.counts_here(node) else 0


def _end(staged: Staged, made: _Made, part: Part, *, first: bool, copies: bool) -> int | None:
    """Return the place in a part after which no node needs a value any more; None if a later part needs it."""
    if made.is_sum:
        return None if first or made.part != part else max(made.at, made.last.get(part, -1))
    device = staged.device(part)
    if made.part == part and any(staged.device(other) != device for other in made.last):
        return None
    readers = [other for other in made.last if not copies or staged.device(other) == device]
    if not readers:
        return made.at
    last = max(readers, key=staged.rank)
    return made.last[last] if last == part else None
