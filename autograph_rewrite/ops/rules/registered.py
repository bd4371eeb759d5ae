"""Custom ops: makes rules from the descriptions that a user gives with `ar.register_op`.

    register_op("Scaled", factors="n d, d -> n d", linear=(0, 1))
    register_op("Gram", factors="n a, n b -> a b | n", linear=(0, 1), work="2 n a b")

A description is data: a plan records its digest, and the certificate parses the same text independently.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.ir.types.opdefs import Arg, find_op
from autograph_rewrite.ops.rules.base import Numbers, Op, Placed, Rule
from autograph_rewrite.ops.rules.factors import Factors, factors, read, require_known, spread

FAMILY = "registered"


@dataclass(frozen=True)
class OpEntry:
    """The description of one op.

    Attributes:
        factors: its dimensions (`ops.rules.factors`).
        linear: operands in each of which it is linear while the others stay fixed.
        additive: it is linear in all its operands together, like a sum.
        fragile: dimensions along which its kernel refuses an empty block.
        work: floating-point operations of one call, as a product of numbers and names of dimensions.
    """

    name: str
    factors: str
    linear: tuple[int, ...] = ()
    additive: bool = False
    fragile: str = ""
    work: str = ""

    @cached_property
    def read(self) -> Factors:
        """The parsed factors."""
        return read(self.factors)

    @property
    def code(self) -> str:
        """A digest, by which a job notices that workers describe an op differently."""
        said = (self.name, self.factors.split(), self.linear, self.additive, self.fragile.split(), self.work.split())
        return hashlib.sha256(repr(said).encode()).hexdigest()[:12]

    @cached_property
    def rule(self) -> Rule:
        """The rule that the description gives."""
        rule = factors(self.factors, linear=self.linear, fragile=self.fragile, additive=self.additive)

        def place(n: Op) -> Placed | None:
            self._require_alike(n)
            return rule.place(n)

        work = (lambda attr, inputs, outputs: self.flops(inputs)) if self.work else None
        return rule._replace(place=place, family=FAMILY, work=work)

    def flops(self, inputs: Numbers) -> float:
        """Return the work of one call.

        Raises:
            ValueError: the operands have other ranks.
        """
        width = self.read.width([len(shape) for shape in inputs])
        if width is None:
            raise ValueError(inputs)
        known: dict[str, int] = {}
        for i, (term, shape) in enumerate(zip(self.read.operands, inputs, strict=True)):
            if term is not None and i not in self.read.sizes:
                known.update(zip(spread(term, width), shape, strict=True))
        words = spread(self.work.split(), width)
        return math.prod(float(word) if _is_number(word) else known.get(word, 1) for word in words)

    def _require_alike(self, n: Op) -> None:
        for what, count, said in (
            ("operands", len(n.inputs), len(self.read.operands)),
            ("results", len(n.output_dtypes), len(self.read.results)),
        ):
            if count != said:
                raise GraphError(f"{self.name} is registered with {said} {what}, and a node has {count}")


_REGISTERED: dict[str, OpEntry] = {}


def register(entry: OpEntry) -> None:
    """Use an entry in every later rewrite of this process; it replaces an entry of the same name.

    Raises:
        ConfigError: the entry contradicts itself, or TensorFlow's definition of the op.
    """
    try:
        _check(entry)
    except ValueError as error:
        raise ConfigError(
            f"the entry of the op '{entry.name}' is wrong: {error}",
            hint="factors are written as in 'n k, k m -> n m': a name for each dimension (docs/writing_rules.md)",
        ) from None
    _REGISTERED[entry.name] = entry


def unregister(name: str) -> None:
    """Remove an entry, if there is one of this name."""
    _REGISTERED.pop(name, None)


def registered() -> Mapping[str, OpEntry]:
    """Return the entries by op type."""
    return dict(_REGISTERED)


def entry_of(op: str) -> OpEntry | None:
    """Return the entry of an op, None where it is not registered."""
    return _REGISTERED.get(op)


def _check(entry: OpEntry) -> None:
    found = entry.read
    require_known(found, [*entry.fragile.split(), *(word for word in entry.work.split() if not _is_number(word))])
    wrong = [i for i in entry.linear if i not in range(len(found.operands)) or i in found.sizes]
    if wrong:
        raise ValueError(f"it cannot be linear in operand {wrong[0]}")
    op = find_op(entry.name)
    if op is None:
        return  # its library is not loaded yet
    for what, said, args in (("operands", found.operands, op.inputs), ("results", found.results, op.outputs)):
        count = _count(args)
        if count is not None and len(said) != count:
            raise ValueError(f"it has {len(said)} {what} there, and TensorFlow's {entry.name} has {count}")


def _count(args: tuple[Arg, ...]) -> int | None:
    return None if any(arg.number_attr or arg.type_list_attr for arg in args) else len(args)


def _is_number(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()
