"""Wrong claims and wrong rules: what the contracts of the certificate have to refuse.

wrong claim    the claim of one value of a right propagation is changed, or the conversion of one input forgotten
wrong rule     the rule of one op says something else wherever it places blocks, contributions or sizes
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from autograph_rewrite.analysis.facts.placement import PARTIAL, REPLICATED, Placement, split
from autograph_rewrite.analysis.rules.base import Op, Placed, Rule
from autograph_rewrite.certify.seen import whole
from autograph_rewrite.ir.claims import Claim, Claims, Dim
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types import dtypes
from tests.seeded_mistakes.draws import Draw
from tests.support.rewriting import run_pipeline


class Seen(Exception):
    """Ends a rewrite once its claims are known."""


class Reader:
    """A certifier that keeps what is claimed."""

    graph: Graph
    claims: Claims

    def begin(self, graph: Graph, targets: Any) -> None:
        """Take the original."""

    def claimed(self, graph: Graph, claims: Claims) -> None:
        """Keep the claims, and end the rewrite."""
        self.graph, self.claims = graph.clone(), claims
        raise Seen

    def check(self, after: str, graph: Graph) -> None:
        """Check nothing."""


def claims_of(draw: Draw) -> tuple[Graph, Claims]:
    """Return the graph that placements are claimed of, and the claims."""
    reader = Reader()
    try:
        run_pipeline(draw.flat, draw.plan, certificate=reader)
    except Seen:
        return reader.graph, reader.claims
    raise AssertionError("nothing was claimed")


class Wrong(NamedTuple):
    """One wrong claim: its kind, where it is, and all claims with it."""

    kind: str
    where: str
    claims: Claims


Change = Callable[[Claim, random.Random], Claim]


def _at(shape: tuple[Dim, ...] | None, dim: int, size: Dim) -> tuple[Dim, ...] | None:
    return None if shape is None else (*shape[:dim], size, *shape[dim + 1 :])


def _whole(shape: tuple[Dim, ...] | None) -> tuple[Dim, ...] | None:
    return None if shape is None else tuple(whole(dim, None) for dim in shape)


def _moved(claim: Claim, rng: random.Random) -> Claim:
    rank = len(claim.shape or ())
    if rank < 2:
        raise LookupError
    dim = rng.choice([d for d in range(rank) if d != claim.dim])
    return claim._replace(dim=dim, shape=_at(_whole(claim.shape), dim, (claim.shape or ())[claim.dim]))


def _as_split(claim: Claim, rng: random.Random) -> Claim:
    if not claim.shape:
        raise LookupError
    dim = rng.randrange(len(claim.shape))
    return claim._replace(kind="split", op="", dim=dim, shape=_at(claim.shape, dim, (1, ("b",))))


def _doubled(entries: tuple[Dim, ...] | None, rng: random.Random) -> tuple[Dim, ...]:
    if not entries:
        raise LookupError
    at = rng.randrange(len(entries))
    entry = entries[at]
    other = (entry[0] * 2, entry[1]) if isinstance(entry, tuple) else (entry or 0) + 1
    return (*entries[:at], other, *entries[at + 1 :])


def _more_rows(claim: Claim, rng: random.Random) -> Claim:
    size = (claim.shape or ())[claim.dim : claim.dim + 1]
    if not size or not isinstance(size[0], tuple):
        raise LookupError
    return claim._replace(shape=_at(claim.shape, claim.dim, (2 * size[0][0], size[0][1])))


CHANGES: Mapping[str, tuple[str, Change]] = {
    # name: the kind of claim that it changes, how
    "split dimension moved": ("split", _moved),
    "split called replicated": ("split", lambda c, r: c._replace(kind="replicated", dim=0, shape=_whole(c.shape))),
    "split called partial": ("split", lambda c, r: Claim("partial", 0, "sum", _whole(c.shape))),
    "split into more rows": ("split", _more_rows),
    "partial called replicated": ("partial", lambda c, r: c._replace(kind="replicated", op="")),
    "partial of another fold": ("partial", lambda c, r: c._replace(op="max" if c.op == "sum" else "sum")),
    "partial called split": ("partial", _as_split),
    "replicated called split": ("replicated", _as_split),
    "replicated called partial": ("replicated", lambda c, r: c._replace(kind="partial", op="sum")),
    "replicated called another number": ("replicated", lambda c, r: c._replace(value=_doubled(c.value, r))),
    "local size called global": ("local", lambda c, r: c._replace(kind="replicated")),
    "local size called that of the whole": ("local", lambda c, r: Claim("replicated", 0, "", c.shape, _whole(c.value))),
    "local size called another": ("local", lambda c, r: c._replace(value=_doubled(c.value, r))),
}
"""Ways to change what is claimed of one value."""


def wrong_claims(graph: Graph, claims: Claims, rng: random.Random, each: int) -> Iterator[Wrong]:
    """Yield claims of which one is wrong, some of each kind."""
    pool: dict[str, list[tuple[str, Claim]]] = defaultdict(list)
    for node in graph:
        for value in node.read_outputs:
            claim = claims.values[value.name]
            if value.dtype == dtypes.RESOURCE or claim.zero or (claim.value == () and claim.kind == "replicated"):
                continue  # zeros are contributions, too
            for name, (kind, change) in CHANGES.items():
                try:
                    if claim.kind == kind:
                        pool[name].append((value.name, change(claim, rng)))
                except LookupError:
                    continue
    for name, found in pool.items():
        for where, claim in rng.sample(found, min(each, len(found))):
            yield Wrong(name, where, replace(claims, values={**claims.values, where: claim}))
    forgotten: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for (name, index), read in claims.reads.items():
        if read.kind == "split" or claims.values[graph.nodes[name].inputs[index].name].differs:
            forgotten[read.kind].append((name, index))
    for kind, places in forgotten.items():
        for place in rng.sample(places, min(each, len(places))):
            left = {key: read for key, read in claims.reads.items() if key != place}
            yield Wrong(f"conversion to {kind} forgotten", f"{place[0]} {place[1]}", replace(claims, reads=left))


# -- rules


def _outputs(change: Callable[[Placement], Placement]) -> Callable[[Op, Placed], Placed]:
    return lambda n, placed: placed._replace(outputs=tuple(change(one) for one in placed.outputs))


def _only(n: Op, placed: Placed) -> Placed:
    return placed._replace(
        operand_reshards={i: reshard for i, reshard in placed.operand_reshards.items() if reshard != REPLICATED}
    )


RULES: Mapping[str, Callable[[Op, Placed], Placed]] = {
    "blocks are whole": _outputs(lambda p: REPLICATED if p.is_split else p),
    "blocks are contributions": _outputs(lambda p: PARTIAL if p.is_split else p),
    "blocks of the next dimension": _outputs(lambda p: split(p.dim + 1) if p.is_split else p),
    "contributions are whole": _outputs(lambda p: REPLICATED if p.is_partial else p),
    "contributions are blocks": _outputs(lambda p: split(0) if p.is_partial else p),
    "contributions to a maximum": _outputs(lambda p: Placement("partial", op="max") if p == PARTIAL else p),
    "reads contributions as they are": _only,
    "reads blocks as they are": lambda n, placed: placed._replace(operand_reshards={}),
}
"""Ways in which a rule may be wrong."""


def spoiled(rule: Rule, how: str) -> Rule:
    """Return a rule that is wrong wherever it places something."""

    def place(n: Op) -> Placed | None:
        placed = rule.place(n)
        return placed if placed is None or placed.decompose else RULES[how](n, placed)

    return rule._replace(place=place)
