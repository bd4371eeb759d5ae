"""Rematerialisation policies: which recomputable nodes are recomputed, and in which segments.

    every:N, sqrt     the forward is cut; what crosses a cut is kept, and everything else computed again
    hierarchical      so are its segments, when they are computed again
    save_matmuls      products and convolutions are kept as well, and the single values between layers
    scopes            each name scope that a pattern matches is a segment
    names             what the patterns name is kept, and everything else computed again
    collection        what a collection of the graph lists is kept, and everything else computed again
    marked            each scope that `ar.recompute_grad` has made is a segment, and what `tf.recompute_grad` repeats

Each policy is a function from activations to numbers of segments; a node without one is kept. What is offloaded is
chosen in the same way: `names`, or what segments keep (where nothing is computed again, what gradients read).

sqrt: T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). What fits a budget is chosen in `budget`,
which needs the memory of the whole step. save_matmuls is the policy of that kind in JAX
(`jax.checkpoint_policies.dots_saveable`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial

from autograph_rewrite.analysis.networks import groups
from autograph_rewrite.diagnostics.faults import did_you_mean
from autograph_rewrite.diagnostics.limits import first_match, matches
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.load.marks import AGAIN_SCOPE, CHECKPOINT_ATTR, CHECKPOINTS, SEGMENT_ATTR, names_given
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import Remat
from autograph_rewrite.resolve.remat.activations import Activations, root_of
from autograph_rewrite.resolve.remat.cuts import balanced_cuts, chain_of, nested_cuts, single_cuts
from autograph_rewrite.resolve.remat.decision import Segment

OFFLOAD_ATTR = "_autograph_offload"
"""The attribute of what is in the host's memory."""
Parts = Mapping[Node, int]
"""By node that is to be computed again, the number of its segment."""


def parts_of(acts: Activations, remat: Remat) -> tuple[Parts, Parts]:
    """Return what a policy computes again, and the parts into which that is cut then; of most policies, none.

    Raises:
        PlanError: it names what the graph does not have.
    """
    found = POLICIES[remat.policy.partition(":")[0]](acts, remat)
    return found if isinstance(found, tuple) else (found, {})


def _every(acts: Activations, remat: Remat) -> Parts:
    number = int(remat.policy.partition(":")[2])
    return _between(acts, [place.at for place in single_cuts(chain_of(acts))[number - 1 :: number]])


def _sqrt(acts: Activations, remat: Remat) -> Parts:
    return _between(acts, balanced_cuts(chain_of(acts)))


def _hierarchical(acts: Activations, remat: Remat) -> tuple[Parts, Parts]:
    outer, inner = nested_cuts(chain_of(acts))
    return _between(acts, outer), _between(acts, inner)


def _save_matmuls(acts: Activations, remat: Remat) -> Parts:
    parts = _between(acts, [place.at for place in single_cuts(chain_of(acts))])
    return {node: part for node, part in parts.items() if not has(node.op, "products", "convolutions")}


def _between(acts: Activations, cuts: Sequence[int]) -> Parts:
    """Make a segment of what is between two cuts."""
    return {node: bisect_right(cuts, i) for i, node in enumerate(acts.forward) if node in acts.repeatable}


def _marked(acts: Activations, remat: Remat) -> Parts:
    """Make a segment of each scope that `ar.recompute_grad` has made, and of what `tf.recompute_grad` repeats."""
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
    """Return the segments of scopes, of nested ones the outermost, and which patterns match one."""
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


def _names(acts: Activations, remat: Remat) -> Parts:
    """Make a segment of each connected part of what is left when the named nodes are kept."""
    return connected(acts, named_nodes(acts, remat))


def named_nodes(acts: Activations, remat: Remat) -> list[Node]:
    """Return the nodes on the way to the loss that the names of the plan match.

    Raises:
        PlanError: a name matches none.
    """
    found: list[Node] = []
    matched: set[int] = set()
    for node in acts.forward:
        known = (node.name, *names_given(node.name))
        hits = {i for i, pattern in enumerate(remat.names) if any(matches(pattern, name) for name in known)}
        if hits:
            matched |= hits
            found.append(node)
    _require_matches(acts, remat.names, matched, "tensor")
    return found


def _collection(acts: Activations, remat: Remat) -> Parts:
    """Make a segment of each connected part of what is left without the tensors of the collection."""
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
            names = [node.name for node in acts.forward]
            names = names if what == "tensor" else sorted({name.rpartition("/")[0] for name in names} - {""})
            key = "names" if what == "tensor" else "scopes"
            raise PlanError(
                f"remat.{key}: no {what} on the way to the loss has a name that '{pattern}' matches as a whole",
                hint=did_you_mean(pattern, names, noun=f"{what}s") if len(names) < 5000 else None,
            )


def connected(acts: Activations, kept: Collection[Node]) -> Parts:
    """Return the connected parts of the nodes that may be computed again, without those in kept memory."""
    kept = {one for node in kept for one in (node, root_of(node))}
    free = [n for n in acts.forward if n in acts.repeatable and n not in kept and root_of(n) not in kept]
    place = {node: i for i, node in enumerate(free)}
    ahead = ((v.node, node) for node in free for v in node.inputs if place.get(v.node, len(free)) < place[node])
    numbers = {node: i for i, group in enumerate(groups(free, ahead)) for node in group}
    return {node: numbers[node] for node in free}


POLICIES: Mapping[str, Callable[[Activations, Remat], Parts | tuple[Parts, Parts]]] = {
    "none": lambda acts, remat: {},
    "every": _every,
    "sqrt": _sqrt,
    "hierarchical": _hierarchical,
    "save_matmuls": _save_matmuls,
    "scopes": _scopes,
    "names": _names,
    "collection": _collection,
    "marked": _marked,
}


def values_to_offload(acts: Activations, remat: Remat, segments: Sequence[Segment]) -> list[Node]:
    """Return the nodes whose values are to be offloaded, in the order of the forward.

    Raises:
        PlanError: a name of the plan matches nothing.
    """
    if remat.offload == "names":
        wanted = set(named_nodes(acts, remat))
    elif segments:
        kept = {name.partition(":")[0] for segment in segments for name in segment.kept}
        wanted = {node for node in acts.forward if node.name in kept}
    else:
        wanted = {node for node in acts.forward if acts.is_kept_today(node)}
    return [node for node in acts.forward if node in wanted and _can_move(acts, node)]


def _can_move(acts: Activations, node: Node) -> bool:
    """Return whether a node makes values of each block, once in a step."""
    if node not in acts.unconditional or has(node.op, "given"):
        return False
    return all(acts.state.source(value).placement.differs for value in node.read_outputs)
