"""Places all ops that map labelled dimensions to labelled dimensions, which most ops do.

    Conv2D                 n... , ....        -> n...     split n: the images; the filter is read whole
    Conv2DBackpropFilter   n... , .... , n... -> ....     split n: summed over, so the result is partial
    Softmax                ab.                -> ab.      the last dimension cannot be split ("" is the label)

`place` picks the label that the inputs are split along, converts every other input that has the label to the same
blocks, and finds the label in the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autograph_rewrite.ir.types.dtypes import INEXACT
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Fact, Placement, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import Dim, any_local, are_rows, broadcast_dim, is_whole_of, to_global
from autograph_rewrite.ops.rules.base import LocalEntry, Op, Placed, Reshard, Rule, block_of, others_whole, whole

Labels = tuple[str, ...]
"""A label per dimension; `-x` cannot be split but has one size wherever it occurs; "" says nothing."""


class Signature(NamedTuple):
    """How the dimensions of inputs and outputs belong together.

    Attributes:
        inputs: labels of each input; None for a parameter, which is read whole.
        outputs: labels of each output; None for an output that is the same for every block (a copy of a parameter).
        summed: labels that are summed over, so that an output without them is partial.
        linear: inputs in each of which the op is linear while the others stay fixed.
        additive: the op is linear in all labelled inputs together, like a sum.
        sizes: inputs that are shape vectors; their labels are those of the shape that they describe.
        stretches: labels whose dimensions broadcast: size one stretches to the size of the others.
        fragile: labels along which the kernel refuses an empty block.
        integers: sums of integers may also be partial.
    """

    inputs: tuple[Labels | None, ...]
    outputs: tuple[Labels | None, ...]
    summed: frozenset[str] = frozenset()
    linear: tuple[int, ...] = ()
    additive: bool = False
    sizes: frozenset[int] = frozenset()
    stretches: frozenset[str] = frozenset()
    fragile: frozenset[str] = frozenset()
    integers: bool = False


Describe = Callable[[Op], Signature | None]


class Cut(NamedTuple):
    """The label that an op is split along, and the size of one block of it."""

    label: str
    size: Dim


@dataclass(frozen=True)
class Placer:
    """The `place` of a rule with a signature: `describe` returns it; `constant` is set where it is always the same.

    `text` has its factors, if it is written in that form (`ops.rules.factors`).
    """

    describe: Describe
    constant: Signature | None = None
    text: str = ""

    def __call__(self, n: Op) -> Placed:
        """Place a node by its signature."""
        return place(n, self.describe(n))


def signed(describe: Describe) -> Rule:
    """Return the rule of an op with a signature; `describe` returns None where the signature is not known."""
    return Rule(Placer(describe), lambda n: shapes(n, describe(n)))


def place(n: Op, sig: Signature | None) -> Placed:
    """Place an op by its signature; where its inputs do not fit, it reads whole values."""
    if sig is None or not _ranks_fit(n, sig):
        return whole(n)
    cut = find_cut(n, sig)
    if cut is None:
        return _linear(n, sig)
    if cut.label in sig.fragile and n.semantics.extent.units is None:
        return whole(n)
    operand_reshards: dict[int, Reshard] = {}
    for i, fact in enumerate(n.inputs):
        converted = _convert(n, i, cut, sig)
        if converted is None:
            return whole(n)
        if converted != fact.placement:
            operand_reshards[i] = converted
    outputs = [_output(labels, cut, sig, dtype) for labels, dtype in zip(sig.outputs, n.output_dtypes, strict=True)]
    placements = tuple(placement for placement in outputs if placement is not None)
    return Placed(placements, operand_reshards) if len(placements) == len(outputs) else whole(n)


def find_cut(n: Op, sig: Signature) -> Cut | None:
    """Return the label that most split inputs are split along; of several, the first.

    Where devices run one program, ties go to labels of variables, so that these stay in their blocks; then to labels
    that an output has, because a split result is better than a partial one.
    """
    found: dict[str, list[Fact]] = {}
    for fact, labels in _labelled(n, sig):
        if fact.placement.is_split and fact.placement.dim < len(labels) and is_open(labels[fact.placement.dim]):
            found.setdefault(labels[fact.placement.dim], []).append(fact)
    if not found:
        return None
    label = next(iter(found))
    if len(found) > 1:
        alike, kept = n.semantics.alike, {one for labels in sig.outputs for one in labels or ()}

        def worth(one: str) -> tuple[int, bool, bool]:
            return len(found[one]), alike and any(fact.held for fact in found[one]), alike and one in kept

        label = max(found, key=worth)
    return Cut(label, found[label][0].split_size)


def is_open(label: str) -> bool:
    """Return whether a dimension with this label may be split."""
    return bool(label) and label[0] != "-"


def _labelled(n: Op, sig: Signature) -> Iterator[tuple[Fact, Labels]]:
    for i, (fact, labels) in enumerate(zip(n.inputs, sig.inputs, strict=False)):
        if labels is not None and i not in sig.sizes:
            yield fact, labels


def _ranks_fit(n: Op, sig: Signature) -> bool:
    return all(fact.shape is None or len(fact.shape) == len(labels) for fact, labels in _labelled(n, sig))


def _convert(n: Op, index: int, cut: Cut, sig: Signature) -> Reshard | None:
    """Return the conversion of one input, its placement where that fits, or None where no conversion helps."""
    fact, batch = n.inputs[index], n.semantics.extent.units
    labels = sig.inputs[index] if index < len(sig.inputs) else None
    if labels is None or cut.label not in labels:
        return REPLICATED if fact.placement.differs else fact.placement
    dim = labels.index(cut.label)
    if index in sig.sizes:
        return _convert_size(fact, dim, cut)
    # Blocks of unknown or different sizes need not line up with the blocks that the op is split into.
    aligned = are_rows(fact.split_size, cut.size) or _alone(sig, cut.label)
    if fact.placement == split(dim) and aligned:
        return fact.placement
    block = block_of(dim, cut.size)
    if cut.label in sig.stretches:
        size = None if fact.shape is None else to_global(fact.shape[dim], batch)
        if size == 1:
            return REPLICATED if fact.placement.differs else fact.placement
        return block if is_whole_of(size, cut.size, batch) else None
    return block


def _alone(sig: Signature, label: str) -> bool:
    return sum(labels is not None and label in labels for labels in sig.inputs) == 1


def _convert_size(fact: Fact, entry: int, cut: Cut) -> Reshard | None:
    if not fact.is_local:
        return None if cut.size is None or fact.placement.differs else LocalEntry(entry, cut.size)
    if fact.value is None or entry >= len(fact.value) or fact.value[entry] != cut.size:
        return None
    others = fact.value[:entry] + fact.value[entry + 1 :]
    return None if any_local(others) else fact.placement


def _output(labels: Labels | None, cut: Cut, sig: Signature, dtype: int) -> Placement | None:
    if labels is None:
        return REPLICATED
    if cut.label in labels:
        return split(labels.index(cut.label))
    return PARTIAL if cut.label in sig.summed and (sig.integers or dtype in INEXACT) else None


def _linear(n: Op, sig: Signature) -> Placed:
    """Place an op whose inputs are not split along a label: a partial value passes where the op is linear."""
    partial = {i for i, fact in enumerate(n.inputs) if fact.placement == PARTIAL}
    if not partial or any(dtype not in INEXACT for dtype in n.output_dtypes):
        return whole(n)
    if sig.additive:
        terms = {i for i, labels in enumerate(sig.inputs) if labels is not None and i not in sig.sizes}
        if not partial <= terms or not all(n.inputs[i].zero for i in terms - partial):
            return whole(n)
    elif len(partial) > 1 or not partial <= set(sig.linear):
        return whole(n)
    return Placed((PARTIAL,) * len(n.output_dtypes), others_whole(n, *partial))


def shapes(n: Op, sig: Signature | None) -> tuple[Shape | None, ...]:
    """Return the shape of one block of each output: sizes of labels from the inputs, other sizes as stated."""
    if sig is None:
        return n.static
    known = sizes(n, sig)
    cut = find_cut(n, sig)
    result = []
    for labels, static in zip(sig.outputs, n.static, strict=True):
        if labels is None:
            result.append(static)
            continue
        stated = static if static is not None and len(static) == len(labels) else (None,) * len(labels)
        result.append(tuple(_size(x, s, known, cut) for x, s in zip(labels, stated, strict=True)))
    return tuple(result)


def _size(label: str, stated: Dim, known: dict[str, Dim], cut: Cut | None) -> Dim:
    if not label:
        return stated
    if known.get(label) is None and (cut is None or cut.label != label):
        return stated
    return known.get(label)


def sizes(n: Op, sig: Signature) -> dict[str, Dim]:
    """Return the size of every label in the inputs; labels that stretch get the broadcast size."""
    found: dict[str, Dim] = {}
    for i, (fact, labels) in enumerate(zip(n.inputs, sig.inputs, strict=False)):
        dims = fact.value if i in sig.sizes else fact.shape
        if labels is None or dims is None or len(dims) != len(labels):
            continue
        for label, dim in zip(labels, dims, strict=True):
            if not label:
                continue
            if label in sig.stretches:
                found[label] = broadcast_dim(found.get(label, 1), dim)
            elif found.get(label) is None:
                found[label] = dim
    return found


def axes(rank: int, prefix: str = "d") -> Labels:
    """Return a label for each of `rank` dimensions."""
    return tuple(f"{prefix}{i}" for i in range(rank))


def without(labels: Labels, *closed: int) -> Labels:
    """Return the labels with the dimensions `closed` (negative: from the end) marked as not to be split."""
    shut = {dim % len(labels) for dim in closed}
    return tuple(f"-{label}" if i in shut and label else label for i, label in enumerate(labels))


def every(rule: Rule, *lines: str) -> dict[str, Rule]:
    """Return one rule for all op types named in `lines`."""
    return dict.fromkeys(" ".join(lines).split(), rule)
