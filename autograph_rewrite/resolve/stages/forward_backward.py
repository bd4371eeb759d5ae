"""Forward and backward pass: which per-replica nodes compute the loss, and which its gradients.

    forward    what the loss depends on, or waits for (assertions)
    backward   what the gradients depend on besides
    the rest   belongs to whichever of the two it reads from

The loss is a number that no gradient has gone into, among the outputs; where it is none of them, the names that
TensorFlow gives to gradients tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import ancestors, descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import is_update
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import STEP
from autograph_rewrite.plan.plan import Plan

GRADIENTS = re.compile(r"gradients(_\d+)?|gradient_tape")
COPIES = "remat"
"""The scope of what is computed again, for the gradients: remat/<segment>/<name of the original>."""
_COPY = re.compile(rf"{COPIES}/\d+/(.+)")


def trained_nodes(plan: Plan, state: Propagation) -> set[Node]:
    """Return the gradients of variables, as the edges of a plan name them.

    A gradient that variables have in pieces, cut in another way than it is, belongs to none of them: it is what is
    named as one, leads to an update, and to no other gradient. Where replicas share their variables and gather what
    gradients are computed from, no edge names any: it is the updates.
    """
    found = {state.graph.value(edge.value).node for edge in plan.edges if edge.owner != STEP}
    others = {state.graph.value(edge.value).node for edge in plan.edges if edge.owner == STEP} - found
    others = {node for node in others if is_named_gradient(node.name)}
    if found and others:
        updating = ancestors([node for node in state.order if is_update(node)], controls=False)
        found |= others & updating - ancestors(found, controls=False)
    return found or {node for node in descendants({one.node for one in state.whole_inputs}) if is_update(node)}


def forward_nodes(plan: Plan, state: Propagation, outputs: Iterable[Value]) -> set[Node]:
    """Return the nodes that make the loss.

    Args:
        plan: its edges name the gradients.
        outputs: values that the user fetches; the loss is one of them.

    Raises:
        PlanError: no variable is trained, or nothing tells the loss from the gradients.
    """
    trained = trained_nodes(plan, state)
    if not trained:
        raise PlanError("no gradient of a variable was found, so there is nothing to cut into stages")
    after, batch = descendants(trained, controls=False), {value.node for value in state.whole_inputs}
    losses = [value.node for value in outputs if value.node not in after and _is_number(state, value)]
    forward = {
        node for loss in losses if not batch.isdisjoint(made := ancestors([loss], controls=False)) for node in made
    }
    needed = ancestors(trained, controls=False)
    named = {node for node in needed if node not in forward and is_named_gradient(node.name)}
    if not named and not forward:
        raise PlanError(
            "nothing tells which part of the graph is forward and which backward",
            hint="declare the loss as an output of the graph",
        )
    if named:  # what no gradient has gone into is forward, too: a loss that is no output
        backward = descendants(named)  # by control edges, too: what is computed again once a gradient is there
        forward |= ancestors([node for node in needed if node not in backward], controls=False)
    return forward | (ancestors(forward) - needed)


def _is_number(state: Propagation, value: Value) -> bool:
    fact = state.facts[value]
    return fact.shape == () and dtypes.base(fact.dtype) in dtypes.FLOATING and not has(value.node.op, "reads_whole")


def is_named_gradient(name: str) -> bool:
    """Return whether a node is named as TensorFlow names gradients."""
    return any(GRADIENTS.fullmatch(part) for part in name.split("/"))


def is_copy(name: str) -> bool:
    """Return whether a node is computed again, for the gradients."""
    return _COPY.fullmatch(name) is not None


def copied(name: str) -> str:
    """Return the name of which a node is a copy; of another node, its own."""
    match = _COPY.fullmatch(name)
    return name if match is None else match[1]


def differentiated(name: str, forward: Mapping[str, int]) -> int | None:
    """Return the entry of the forward node of which a node computes the gradient, or is a copy, going by its name.

    Args:
        name: `gradients/layer/MatMul_grad/MatMul_1`, `gradient_tape/layer/MatMul/MatMul_1`, or `remat/0/layer/MatMul`.
    """
    if (copy := _COPY.fullmatch(name)) is not None and copy[1] in forward:
        return forward[copy[1]]
    parts = name.split("/")
    at = next((i for i, part in enumerate(parts) if GRADIENTS.fullmatch(part)), None)
    if at is None:
        return None
    for end in range(len(parts), at + 1, -1):
        rest = [*parts[at + 1 : end - 1], re.sub(r"_grad(_\d+)?$", "", parts[end - 1])]
        for candidate in ("/".join([*parts[:at], *rest]), "/".join(rest)):
            if candidate in forward:
                return forward[candidate]
    return None
