"""Implement the rematerialisation policies: which nodes are recomputed, and in which segments.

    every:N, sqrt     the forward is cut; values that cross a cut are kept, and all others recomputed
    hierarchical      its segments are cut, too, when they are recomputed
    save_matmuls      products and convolutions are kept, and the single values between layers
    scopes            each name scope that a pattern matches is a segment
    names             values that the patterns name are kept, and all others recomputed
    collection        values in a collection of the graph are kept, and all others recomputed
    marked            each scope of `ar.recompute_grad` is a segment, and each group that `tf.recompute_grad` repeats

Each policy is a function from activations to numbers of segments; a node without a number is kept. Offloaded values are
those with `names`, or those that segments keep (where nothing is recomputed, those that gradients read).

sqrt: T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). The module `budget` implements `budget`,
which needs the memory of the whole step. save_matmuls resembles `jax.checkpoint_policies.dots_saveable`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.analysis.networks import groups
from autograph_rewrite.diagnostics.faults import did_you_mean
from autograph_rewrite.diagnostics.limits import first_match, matches
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import ORIGIN_ATTR, Node
from autograph_rewrite.ir.run_writes import name_of_whole
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.load.marks import AGAIN_SCOPE, CHECKPOINT_ATTR, CHECKPOINTS, SEGMENT_ATTR, names_given
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import Remat
from autograph_rewrite.resolve.remat.activations import Activations, Segment, root_of

OFFLOAD_ATTR = "_autograph_offload"
"""The attribute of nodes whose values are in the host's memory."""
Parts = Mapping[Node, int]
"""The number of the segment of each node that is to be recomputed."""


def parts_of(acts: Activations, remat: Remat) -> tuple[Parts, Parts]:
    """Return the segments that a policy recomputes, and the inner segments within them; most policies have none.

    Raises:
        PlanError: the policy names nodes that the graph does not have.
    """
    found = POLICIES[remat.policy.partition(":")[0]](acts, remat)
    return found if isinstance(found, tuple) else (found, {})


def _every(acts: Activations, remat: Remat) -> Parts:
    number = int(remat.policy.partition(":")[2])
    return _between(acts, [place.at for place in single_cuts(chain_of(acts))[number - 1 :: number]])


def _hierarchical(acts: Activations, remat: Remat) -> tuple[Parts, Parts]:
    outer, inner = nested_cuts(chain_of(acts))
    return _between(acts, outer), _between(acts, inner)


def _save_matmuls(acts: Activations, remat: Remat) -> Parts:
    parts = _between(acts, [place.at for place in single_cuts(chain_of(acts))])
    return {node: part for node, part in parts.items() if not has(node.op, "products", "convolutions")}


def _between(acts: Activations, cuts: Sequence[int]) -> Parts:
    """Make a segment of the nodes between two cuts."""
    return {node: bisect_right(cuts, i) for i, node in enumerate(acts.forward) if node in acts.repeatable}


def _marked(acts: Activations, remat: Remat) -> Parts:
    """Make a segment of each scope of `ar.recompute_grad`, and of each group that `tf.recompute_grad` repeats."""
    parts = dict(_in_scopes(acts, (AGAIN_SCOPE,))[0])
    numbers: dict[str, int] = {}
    for node in acts.forward:
        if node in acts.repeatable and node not in parts and (segment := node.attr(SEGMENT_ATTR)) is not None:
            parts[node] = numbers.setdefault(segment, -1 - len(numbers))
    return parts


def _scopes(acts: Activations, remat: Remat) -> Parts:
    """Make a segment of each scope that a pattern matches."""
    parts, matched = _in_scopes(acts, remat.scopes)
    _require_matches(acts, remat.scopes, matched, "scope")
    return parts


def _in_scopes(acts: Activations, scopes: Sequence[str]) -> tuple[Parts, set[int]]:
    """Return the segments of scopes (of nested ones, the outermost), and the patterns that match a scope."""
    known = cache(partial(first_match, scopes))
    numbers: dict[str, int] = {}
    parts: dict[Node, int] = {}
    matched: set[int] = set()
    for node in acts.forward:
        scope = next((scope for scope in _scopes_of(node.name) if known(scope) is not None), None)
        if scope is not None:
            matched.add(known(scope) or 0)
            if node in acts.repeatable:
                parts[node] = numbers.setdefault(scope, len(numbers))
    return parts, matched


def _scopes_of(name: str) -> Iterator[str]:
    """Yield the scopes around a node, the outermost first."""
    return (name[:i] for i, letter in enumerate(name) if letter == "/")


def named_nodes(acts: Activations, remat: Remat) -> list[Node]:
    """Return the nodes on the way to the loss that the names of the plan match.

    Raises:
        PlanError: a name matches none.
    """
    found: list[Node] = []
    matched: set[int] = set()
    for node in acts.forward:
        known = (node.name, name := name_of_whole(node), *names_given(name))
        hits = {i for i, pattern in enumerate(remat.names) if any(matches(pattern, name) for name in known)}
        if hits:
            matched |= hits
            found.append(node)
    _require_matches(acts, remat.names, matched, "tensor")
    return found


def _collection(acts: Activations, remat: Remat) -> Parts:
    """Make a segment of each connected part that the tensors of the collection leave."""
    marked = [node for node in acts.forward if CHECKPOINT_ATTR in node.attrs]
    if not marked:
        raise PlanError(
            f"remat.policy collection: nothing on the way to the loss is in the graph's collection '{CHECKPOINTS}'",
            hint=f"tf.compat.v1.add_to_collection('{CHECKPOINTS}', tensor) before the graph is loaded",
        )
    return connected(acts, marked)


def _require_matches(acts: Activations, patterns: Sequence[str], matched: Collection[int], what: str) -> None:
    for i, pattern in enumerate(patterns):
        if i not in matched:
            given = ((name_of_whole(node), node.attr(ORIGIN_ATTR)) for node in acts.forward)
            names = list(dict.fromkeys(name for name, origin in given if origin in (None, name.encode())))
            names = names if what == "tensor" else sorted({name.rpartition("/")[0] for name in names} - {""})
            key = "names" if what == "tensor" else "scopes"
            raise PlanError(
                f"remat.{key}: no {what} on the way to the loss has a name that '{pattern}' matches as a whole",
                hint=did_you_mean(pattern, names, noun=f"{what}s") if len(names) < 5000 else None,
            )


def connected(acts: Activations, kept: Collection[Node]) -> Parts:
    """Return the connected parts of the nodes that may be recomputed, without nodes whose memory is kept."""
    kept = {one for node in kept for one in (node, root_of(node))}
    free = [n for n in acts.forward if n in acts.repeatable and n not in kept and root_of(n) not in kept]
    place = {node: i for i, node in enumerate(free)}
    ahead = ((v.node, node) for node in free for v in node.inputs if place.get(v.node, len(free)) < place[node])
    numbers = {node: i for i, group in enumerate(groups(free, ahead)) for node in group}
    return {node: numbers[node] for node in free}


POLICIES: Mapping[str, Callable[[Activations, Remat], Parts | tuple[Parts, Parts]]] = {
    "none": lambda acts, remat: {},
    "every": _every,
    "sqrt": lambda acts, remat: _between(acts, balanced_cuts(chain_of(acts))),
    "hierarchical": _hierarchical,
    "save_matmuls": _save_matmuls,
    "scopes": _scopes,
    "names": lambda acts, remat: connected(acts, named_nodes(acts, remat)),
    "collection": _collection,
    "marked": _marked,
}


def values_to_offload(acts: Activations, remat: Remat, segments: Sequence[Segment]) -> list[Node]:
    """Return the nodes whose values are to be offloaded, in the order of the forward.

    Raises:
        PlanError: a name of the plan matches nothing.
    """
    if remat.offload == "names":
        wanted = named_nodes(acts, remat)
    elif segments:
        kept = {name.partition(":")[0] for segment in segments for name in segment.kept}
        wanted = [node for node in acts.forward if node.name in kept]
    else:
        wanted = [node for node in acts.forward if acts.is_kept_today(node)]
    return [node for node in wanted if _can_move(acts, node)]


def _can_move(acts: Activations, node: Node) -> bool:
    """Return whether a node makes values for each block, once in a step."""
    if node not in acts.unconditional or has(node.op, "given"):
        return False
    return all(acts.state.source(value).placement.differs for value in node.read_outputs)


# Checkpoints on a chain: where to cut the forward pass so that little is kept and little is recomputed at a time.
#
#     activations   1 1 1 1 | 1 1 1 1 | 1 1 1 1 | 1 1 1 1      kept: one at each cut, and one part at a time
#     peak          3 at the cuts + 4 in the largest part
#
# After T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); a chain of n equal layers gets about
# sqrt(n) cuts. Several values may cross a cut, which costs all of them; a value that crosses several cuts costs once.


MAX_PLACES = 600
"""Most cuts that are considered; of more, the lightest in each stretch."""
SHORT = 40
"""Up to this many cuts, the choice is optimal."""


class CrossingNode(NamedTuple):
    """A node whose memory is read on both sides of a cut, with its index in the forward and its bytes."""

    at: int
    node: Node
    nbytes: float


@dataclass(frozen=True)
class CutPlace:
    """A place where the forward can be cut: after a node.

    Attributes:
        at: how many nodes of the forward are before it.
        crossing: nodes that are read on both sides.
        nbytes: of the nodes that cross.
        before: bytes that are kept, without recomputation, of the nodes before it.
    """

    at: int
    crossing: tuple[CrossingNode, ...]
    nbytes: float
    before: float


@dataclass(frozen=True)
class Chain:
    """The forward as a chain.

    Attributes:
        places: where it can be cut, in order.
        total: bytes that are kept without recomputation.
    """

    places: tuple[CutPlace, ...]
    total: float


def chain_of(acts: Activations, nbytes: Callable[[Node], float] | None = None) -> Chain:
    """Return the forward as a chain that can be cut where the value of a recomputable node crosses.

    Args:
        nbytes: gives the memory of a node; left out, that of one example.
    """
    nbytes = nbytes or acts.nbytes
    number = {node: i for i, node in enumerate(acts.forward)}
    ends: dict[Node, int] = {}
    kept = [0.0] * (len(acts.forward) + 1)
    counted: set[Node] = set()
    for node in acts.forward:
        root = root_of(node)
        if root not in acts.repeatable:
            continue
        readers = [number[use.node] for value in node.read_outputs for use in value.uses if use.node in number]
        ends[root] = max([ends.get(root, number[root]), *readers])
        if acts.is_kept_today(node) and root not in counted:
            counted.add(root)
            kept[number[root] + 1] += nbytes(root)
    before = np.cumsum(kept).tolist()
    closes = grouped((end, root) for root, end in ends.items())
    open_: dict[Node, CrossingNode] = {}
    places = []
    for i, node in enumerate(acts.forward):
        for root in closes.get(i, ()):
            open_.pop(root, None)
        if ends.get(node, i) > i:
            open_[node] = CrossingNode(i, node, nbytes(node))
        if open_:
            crossing = tuple(open_.values())
            places.append(CutPlace(i + 1, crossing, sum(one.nbytes for one in crossing), before[i + 1]))
    return Chain(tuple(places), before[-1])


def single_cuts(chain: Chain) -> list[CutPlace]:
    """Return the cuts that a single value crosses; of cuts between which gradients need nothing, the lightest."""
    return _lightest((place for place in chain.places if len(place.crossing) == 1), attrgetter("before"))


def balanced_cuts(chain: Chain) -> list[int]:
    """Return after how many nodes to cut, so that the kept bytes plus the largest part are least."""
    places = candidates(chain)
    if not places:
        return []
    total = chain.total
    before = np.array([0.0, *(place.before for place in places), total])
    costs = crossing_bytes(places)
    best, found = total, list[int]()
    # for each possible size of the largest part, the cuts that keep least; the best of these is optimal
    for limit in _limits(before):
        chosen = _least_kept(before, costs, limit * (1 + 1e-9))
        if chosen is None:
            continue
        stops = [0, *chosen, len(before) - 1]
        kept = sum(costs[a, b] for a, b in itertools.pairwise(stops))
        peak = kept + max(before[b] - before[a] for a, b in itertools.pairwise(stops))
        if peak < best * (1 - 1e-9):
            best, found = peak, [places[i - 1].at for i in chosen]
    return found


def nested_cuts(chain: Chain) -> tuple[list[int], list[int]]:
    """Return after how many nodes to cut, and where the parts between are cut again when they are recomputed.

    The outer cuts, the inner cuts of one part, and the largest part between two of these are alive together: in a chain
    of n equal layers, three times the third root of n. Gradients begin in the last part, which is not recomputed a
    second time: all its cuts are outer ones.
    """
    places = candidates(chain)
    before = np.array([0.0, *(place.before for place in places), chain.total])
    costs = crossing_bytes(places)
    best, found = chain.total, (list[int](), list[int]())
    for limit in _limits(before) if places else ():
        cuts = _least_kept(before, costs, limit * (1 + 1e-9)) or []
        for size in range(1, len(cuts) + 1):
            outer = cuts[size - 1 :: size]
            stops = [0, *outer, len(before) - 1]
            inner = [[a, *(cut for cut in cuts if a < cut < b), b] for a, b in itertools.pairwise(stops)]
            parts = [before[b] - before[a] for one in inner for a, b in itertools.pairwise(one)]
            kept = sum(costs[a, b] for a, b in itertools.pairwise(stops))
            again = max(sum(costs[a, b] for a, b in itertools.pairwise(one[:-1])) for one in inner)
            if (peak := kept + again + max(parts)) < best * (1 - 1e-9):
                best = peak
                last = [i for i in cuts if i > outer[-1]]
                found = [places[i - 1].at for i in (*outer, *last)], [places[i - 1].at for i in cuts]
    return found


def _limits(before: Any) -> list[float]:
    """Return the sizes to try for the largest part: all possible ones for a short chain, a selection for a long one."""
    if len(before) <= SHORT:
        return sorted({float(b - a) for i, a in enumerate(before) for b in before[i + 1 :]})
    counts = [float(n) for n in range(2, 65)]
    while counts[-1] * 1.15 < len(before):
        counts.append(counts[-1] * 1.15)
    return [before[-1] / count for count in counts]


def _lightest(places: Iterable[CutPlace], stretch_of: Callable[[CutPlace], float]) -> list[CutPlace]:
    """Return the place in each stretch that the fewest bytes cross, if anything is kept before it."""
    found: dict[float, CutPlace] = {}
    for place in places:
        stretch = stretch_of(place)
        if place.before and (stretch not in found or place.nbytes < found[stretch].nbytes):
            found[stretch] = place
    return list(found.values())


def candidates(chain: Chain, most: int = MAX_PLACES) -> Sequence[CutPlace]:
    """Return the places worth cutting, at most `most`: those that the fewest bytes cross."""
    places = _lightest(chain.places, attrgetter("before"))
    if len(places) <= most:
        return places
    return _lightest(places, lambda place: int(place.before / chain.total * most))


def crossing_bytes(places: Sequence[CutPlace]) -> Any:
    """Return [a, b]: the bytes that the b-th cut keeps in addition to the a-th, the one before it; 0 is the start."""
    costs = np.zeros((len(places) + 2, len(places) + 2))
    starts = np.array([0, *(place.at for place in places)])
    for b, place in enumerate(places, start=1):
        for one in place.crossing:  # the a-th cut already keeps the nodes before it
            costs[: np.searchsorted(starts, one.at, side="right"), b] += one.nbytes
    return costs


def _least_kept(before: Any, costs: Any, limit: float) -> list[int] | None:
    """Return the cuts that keep least with no part above a limit; None if there are none."""
    ends = len(before)
    best = np.full(ends, np.inf)
    best[0] = 0.0
    came = [0] * ends
    for b in range(1, ends):
        first = int(np.searchsorted(before, before[b] - limit, side="left"))
        if first >= b:
            return None
        totals = best[first:b] + costs[first:b, b]
        i = int(np.argmin(totals))
        best[b], came[b] = totals[i], first + i
    if not np.isfinite(best[-1]):
        return None
    chosen, at = [], came[-1]
    while at:
        chosen.append(at)
        at = came[at]
    return chosen[::-1]
