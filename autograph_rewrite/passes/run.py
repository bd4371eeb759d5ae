"""Run: what happens around each pass (timing, verification, observers, the certificate)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from autograph_rewrite.errors import add_note
from autograph_rewrite.ir.claims import Certifier
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.passes.rematerialize.decision import Decision
from autograph_rewrite.passes.report import PassRecord

Observer = Callable[[str, Graph], None]
"""Called after each pass with its name and the folded graph."""


@dataclass
class Run:
    """Times the passes, verifies the graph between them, and shows it to who wants to see it.

    Attributes:
        graph: the folded graph that passes edit.
        verify: checks it after each pass.
        observers: called after each pass.
        certificate: sees what observers have seen, and compares it with the original.
        records: what each pass took.
        recomputed: what is computed again for the gradients.
    """

    graph: Graph
    verify: Callable[[Graph], None] | None = None
    observers: Sequence[Observer] = ()
    certificate: Certifier | None = None
    records: list[PassRecord] = field(default_factory=list)
    recomputed: Decision = field(default_factory=Decision)
    _verified: int = -1  # the graph's edits when it was verified last; a pass that only decides changes nothing

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run one pass; an error says which pass it came from."""
        graph = self.graph
        before, graph.current_pass, began = len(graph), name, time.perf_counter()
        try:
            yield
            if self.verify is not None and graph.edits != self._verified:
                self.verify(graph)
                self._verified = graph.edits
        except Exception as error:
            add_note(error, f"while running pass '{name}'")
            raise
        finally:
            graph.current_pass = ""
        delta = len(graph) - before
        self.records.append(PassRecord(name, time.perf_counter() - began, max(delta, 0), max(-delta, 0)))
        for observe in self.observers:
            observe(name, graph)
        if self.certificate is not None:
            self.certificate.check(name, graph)
