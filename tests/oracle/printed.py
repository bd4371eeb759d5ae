"""The printed form of a rewrite under way: the one module here that knows internals of the package."""

from __future__ import annotations

import re
from typing import Any

_REMARK = re.compile(r"  # .*$", re.MULTILINE)


def observer(forms: list[tuple[str, str]]) -> Any:
    """An observer that appends each pass and the form after it, with the placements that are known by then."""
    from autograph_rewrite.inspect.pass_states import placements_of
    from autograph_rewrite.ir.format.printer import render
    from autograph_rewrite.passes.base.pass_manager import RewriteObserver

    class Printer(RewriteObserver):
        def after_pass(self, name: str, rewrite: Any) -> None:
            """Keep the form after a pass."""
            forms.append((name, plain(render(rewrite.graph, placements=placements_of(rewrite)))))

    return Printer()


def plain(text: str) -> str:
    """A form without the remarks, which say which pass made a node."""
    return _REMARK.sub("", text)
