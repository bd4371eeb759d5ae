"""What is shown of a plan in a line, and in a notebook: its edges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autograph_rewrite.notebook import NotebookView, table, text
from autograph_rewrite.plan.parts.messages import EdgePlan


class PlanView(NotebookView):
    """The view of a plan, which has these attributes and says what they mean."""

    strategy: str
    mode: str
    edges: tuple[EdgePlan, ...]
    notes: Sequence[str]

    @property
    def replicas(self) -> int:
        """How many there are."""
        raise NotImplementedError

    def __str__(self) -> str:
        edges = f"{len(self.edges)} reshards" if self.edges else "reshards follow from the graph"
        return f"{self.strategy or 'plan'} for {self.replicas} replicas ({self.mode}): {edges}"

    def _html_parts(self) -> Iterator[str]:
        rows = ((one.value, one.lowering, one.bytes, one.owner, one.reason) for one in self.edges)
        yield table(("value", "by", "#bytes", "for", "reason"), rows)
        yield text("\n".join(self.notes))
