"""What each pass left: graphs of one device that can be run, and the first refusal of the certificate.

    eliminate-dead-code ► propagate ► own passes ► decompose ► ... ► insert-reshards ► ... ► expand
    └───────── each state is a graph of one device ─────────────┘    └── folded: the certificate runs it on samples ──┘

Passes of the user's own run among those whose results one device can run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.claims import Claims
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.passes.base.pass_manager import RewriteObserver
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.variable_sharding.pieces import WholeVariables
from autograph_rewrite.training_graph import TrainingGraph

CONVERTS = "assign-spans"
"""The first pass after which one device cannot run the graph: nodes are those of several replicas."""
MEANS_BLOCKS = frozenset(
    ("slice-batch-inputs", "partition-model", "localize-indices", "localize-kept-rows", "local-batch-norm")
)
"""Passes whose result one device cannot run as it is: it speaks of blocks, or of devices of a replica."""


@dataclass(frozen=True)
class State:
    """The item behind a pass."""

    behind: str
    item: TrainingGraph


class PlainStates(RewriteObserver):
    """Keeps the graph behind every pass that has changed it, for as long as one device can run it.

    Args:
        flat: where the passes begin.
    """

    def __init__(self, flat: TrainingGraph) -> None:
        self.states = [State("normalise", flat)]
        self._edits = -1
        self._is_over = False

    def after_pass(self, name: str, rewrite: Rewrite) -> None:
        """Keep the graph behind the pass of that name."""
        edited = rewrite.graph.edits != self._edits
        self._edits = rewrite.graph.edits
        self._is_over = self._is_over or name == CONVERTS or (name in MEANS_BLOCKS and edited)
        if not edited or self._is_over:
            return
        graph, item = rewrite.graph.clone(), rewrite.item
        for node in graph:
            node.drop_attr("_class")  # what they stand beside may be gone; devices are assigned later
        variables = rewrite.get(WholeVariables).variables if rewrite.has(WholeVariables) else item.variables
        values = dict(zip(item.outputs, rewrite.outputs, strict=True))
        outputs = {
            name: replace(info, tensor=f"{values[name].node.name}:{values[name].index}")
            for name, info in item.outputs.items()
        }
        self.states.append(
            State(name, replace(item, source=graph, outputs=outputs, variables=variables, stated_placements=None))
        )


class FirstRefusal:
    """A certificate that notes its first refusal and lets the rewrite go on, so that its result can be run.

    Attributes:
        pass_name: behind which the graph is refused; empty where none is.
        error: the refusal.
        claims: what propagation has claimed.
    """

    def __init__(self) -> None:
        self.certificate = Certificate()
        self.pass_name = ""
        self.error: VerifyError | None = None
        self.claims: Claims | None = None

    def begin(self, graph: Graph, targets: Sequence[str]) -> None:
        """Take the normalised original."""
        self.certificate.begin(graph, targets)

    def claimed(self, graph: Graph, claims: Claims) -> None:
        """Take the graph that placements are claimed of."""
        self.claims = claims
        self._note(CONVERTS, lambda: self.certificate.claimed(graph, claims))

    def check(self, after: str, graph: Graph) -> None:
        """Check behind a pass, unless something was refused already."""
        self._note(after, lambda: self.certificate.check(after, graph))

    def _note(self, name: str, check: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            check()
        except VerifyError as error:
            self.pass_name, self.error = name, error
