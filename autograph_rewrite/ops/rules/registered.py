"""Ops of the user's own: `register_op` describes one, and its rule follows from that.

    register_op("Scaled", factors="n d, d -> n d", linear=(0, 1))
    register_op("Gram", factors="n a, n b -> a b | n", linear=(0, 1), work="2 n a b")

    n d    a name for each dimension: what has one name has one size, and is cut together
    .      a dimension that cannot be cut
    ...    any number of dimensions; in all operands and results that have them they are the same
    *      an operand that is read whole; a result that is the same whatever is cut
    # n d  a vector of sizes, whose entries are those of the named dimensions
    | n    the op sums over n, so that a block gives a contribution

A description is data: a plan records its digest, and the certificate reads the same text for itself.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.ir.types.opdefs import OpDef, find_op
from autograph_rewrite.ops.rules.base import Numbers, Op, Rule
from autograph_rewrite.ops.rules.signature import Labels, Placer, Signature, axes, shapes

FAMILY = "registered"
_REST = "..."
_WORD = re.compile(r"[A-Za-z_]\w*|\.\.\.|[.*#]")
_Term = tuple[str, ...] | None
"""The names of one operand or result; None for one that is read whole."""


@dataclass(frozen=True)
class OpEntry:
    """What is known of one op.

    Attributes:
        name: the op type.
        factors: its dimensions, in the notation above.
        linear: operands in each of which it is linear while the others stay fixed.
        additive: it is linear in all its operands together, as a sum of them is.
        fragile: dimensions along which its kernel refuses a block without rows.
        work: floating-point operations of one call, as a product of numbers and names of dimensions.
    """

    name: str
    factors: str
    linear: tuple[int, ...] = ()
    additive: bool = False
    fragile: str = ""
    work: str = ""

    @cached_property
    def operands(self) -> tuple[_Term, ...]:
        """The names of the dimensions of each operand."""
        return tuple(map(_term, self._sides[0].split(",")))

    @cached_property
    def results(self) -> tuple[_Term, ...]:
        """The names of the dimensions of each result."""
        return tuple(map(_term, self._sides[1].split(",")))

    @cached_property
    def summed(self) -> frozenset[str]:
        """The names that are summed over."""
        return frozenset(self._sides[2].split())

    @cached_property
    def sizes(self) -> frozenset[int]:
        """The operands that state sizes."""
        return frozenset(i for i, text in enumerate(self._sides[0].split(",")) if text.split()[:1] == ["#"])

    @property
    def code(self) -> str:
        """A digest: workers that describe an op in another way would make another graph."""
        said = (self.name, self.factors.split(), self.linear, self.additive, self.fragile.split(), self.work.split())
        return hashlib.sha256(repr(said).encode()).hexdigest()[:12]

    @cached_property
    def rule(self) -> Rule:
        """Return how the op divides."""
        return Rule(
            Placer(self._signature),
            lambda n: shapes(n, self._signature(n)),
            family=FAMILY,
            work=(lambda attr, inputs, outputs: self.flops(inputs)) if self.work else None,
        )

    @cached_property
    def _sides(self) -> tuple[str, str, str]:
        left, _, right = self.factors.partition("->")
        right, _, summed = right.partition("|")
        return left, right, summed

    def flops(self, inputs: Numbers) -> float:
        """Return the work of one call.

        Raises:
            ValueError: the operands have other ranks.
        """
        width = _rest(self.operands, [len(shape) for shape in inputs])
        if width is None:
            raise ValueError(inputs)
        known: dict[str, int] = {}
        for i, (term, shape) in enumerate(zip(self.operands, inputs, strict=False)):
            if term is not None and i not in self.sizes:
                known.update(zip(_spread(term, width), shape, strict=False))
        sizes = (known.get(word) for word in _spread(tuple(self.work.split()), width) if not _is_number(word))
        numbers = (float(word) for word in self.work.split() if _is_number(word))
        return math.prod(numbers) * math.prod(1 if size is None else size for size in sizes)

    def _signature(self, n: Op) -> Signature | None:
        """Return the factors of one node; None where the ranks of its operands are others, or not known.

        Raises:
            GraphError: it has other operands or results than the op is said to have.
        """
        for what, count, said in (
            ("operands", len(n.inputs), len(self.operands)),
            ("results", len(n.output_dtypes), len(self.results)),
        ):
            if count != said:
                raise GraphError(f"{self.name} is registered with {said} {what}, and a node has {count}")
        ranks = [None if i in self.sizes else fact.rank for i, fact in enumerate(n.inputs)]
        width = _rest(self.operands, ranks)
        if width is None:
            return None
        return Signature(
            tuple(None if term is None else _labels(term, width) for term in self.operands),
            tuple(None if term is None else _labels(term, width) for term in self.results),
            frozenset(_labels(tuple(self.summed), width)),
            self.linear,
            self.additive,
            self.sizes,
            fragile=frozenset(_labels(tuple(self.fragile.split()), width)),
        )


_REGISTERED: dict[str, OpEntry] = {}


def register(entry: OpEntry) -> None:
    """Divide an op as an entry says in every rewrite of this process from now on; one of the same name takes its place.

    Raises:
        ConfigError: the entry contradicts itself, or what TensorFlow knows of the op.
    """
    problem = next(filter(None, (check(entry) for check in (_grammar, _names, _operands_named, _declared))), None)
    if problem is not None:
        raise ConfigError(f"the entry of the op '{entry.name}' is wrong: {problem}", hint=_HINT)
    _REGISTERED[entry.name] = entry


def unregister(name: str) -> None:
    """Take an entry back; nothing happens if there is none of this name."""
    _REGISTERED.pop(name, None)


def registered() -> Mapping[str, OpEntry]:
    """Return the entries by op type."""
    return dict(_REGISTERED)


def entry_of(op: str) -> OpEntry | None:
    """Return the entry of an op, None where it is not registered."""
    return _REGISTERED.get(op)


_HINT = "factors are written as in 'n k, k m -> n m': a name for each dimension (docs/writing_rules.md)"


def _grammar(entry: OpEntry) -> str | None:
    """Return which word is none."""
    if not re.fullmatch(r"[A-Za-z]\w*", entry.name):
        return "this is no name of an op"
    if entry.factors.count("->") != 1:
        return f"'{entry.factors}' has no arrow from operands to results"
    left, right, summed = entry._sides
    for text in (*left.split(","), *right.split(","), summed):
        words = text.split()
        wrong = next((word for word in words if not _WORD.fullmatch(word)), None)
        if wrong is not None:
            return f"'{wrong}' is no name of a dimension"
        if "*" in words and len(words) > 1:
            return f"'{text.strip()}': * stands alone"
        if "#" in words[1:] or ("#" in words and text not in left.split(",")):
            return f"'{text.strip()}': # stands before the names of an operand"
        named = [word for word in words if word != "."]
        if len(set(named)) < len(named):
            return f"'{text.strip()}' has a name twice: a block of the diagonal is not the diagonal of a block"
    return None


def _names(entry: OpEntry) -> str | None:
    """Return which name stands nowhere else."""
    known = {word for term in entry.operands if term is not None for word in term} - {"."}
    words = {word for term in entry.results if term is not None for word in term} - {"."}
    words |= {*entry.summed, *entry.fragile.split(), *(word for word in entry.work.split() if not _is_number(word))}
    strange = sorted(words - known)
    return f"no operand has the dimension '{strange[0]}'; one that only a result has is written ." if strange else None


def _operands_named(entry: OpEntry) -> str | None:
    """Return which operand that it is linear in there is not."""
    wrong = [i for i in entry.linear if i not in range(len(entry.operands)) or i in entry.sizes]
    return f"it cannot be linear in operand {wrong[0]}" if wrong else None


def _declared(entry: OpEntry) -> str | None:
    """Return where the op that TensorFlow has loaded has another number of operands or results."""
    op = find_op(entry.name)
    if op is None:
        return None  # its library is not loaded yet
    for what, said, count in (
        ("operands", len(entry.operands), _count(op, "inputs")),
        ("results", len(entry.results), _count(op, "outputs")),
    ):
        if count is not None and said != count:
            return f"it has {said} {what} there, and TensorFlow's {entry.name} has {count}"
    return None


def _count(op: OpDef, side: str) -> int | None:
    args = getattr(op, side)
    return None if any(arg.number_attr or arg.type_list_attr for arg in args) else len(args)


def _term(text: str) -> _Term:
    words = tuple(word for word in text.split() if word != "#")
    return None if words == ("*",) else words


def _rest(terms: Sequence[_Term], ranks: Sequence[int | None]) -> int | None:
    """Return how many dimensions `...` stands for, 0 where it does not occur; None where that is not known."""
    spread = [(term, rank) for term, rank in zip(terms, ranks, strict=False) if term is not None and _REST in term]
    widths = {rank - len(term) + 1 for term, rank in spread if rank is not None}
    if not spread:
        return 0
    return widths.pop() if len(widths) == 1 and min(widths) >= 0 else None


def _spread(term: Sequence[str], width: int) -> Labels:
    return tuple(name for word in term for name in (axes(width, _REST) if word == _REST else (word,)))


def _labels(term: Sequence[str], width: int) -> Labels:
    return tuple("" if word == "." else word for word in _spread(term, width))


def _is_number(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()
