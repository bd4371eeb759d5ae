"""The passes in their order, each with the sentence by which it introduces itself."""

from __future__ import annotations

from autograph_rewrite.passes.pass_pipeline import PIPELINE
from autograph_rewrite.tools.dev.reference.sources import table

HEAD = """\
# Passes

A rewrite runs these passes on the folded graph, in this order, and verifies the graph after each. A pass runs only
where there is something for it to do. `autograph-rewrite opt --list` prints the same list, `opt --stop-after PASS` the
graph after one of them, and [architecture](../architecture.md#the-way-of-a-rewrite) says how they work together.
[A pass of your own](../writing_passes.md) can go after any of them.

"""


def passes_page() -> str:
    """Return the page of all passes."""
    return HEAD + table(("pass", "what it does"), *((f"`{one.name}`", one.summary) for one in PIPELINE))
