"""All generated reference pages by file name; each module of this folder makes one or more of them.

They are made whenever the site is built, so there is nothing that could be out of date.
"""

from __future__ import annotations

from autograph_rewrite.tools.dev.reference.api import api_page
from autograph_rewrite.tools.dev.reference.compatibility import compatibility_page
from autograph_rewrite.tools.dev.reference.messages import messages_page
from autograph_rewrite.tools.dev.reference.passes import passes_page
from autograph_rewrite.tools.dev.reference.settings import presets_page, settings_page
from autograph_rewrite.tools.dev.reference.strategies import strategies_page
from autograph_rewrite.tools.dev.reference.verbs import verbs_page


def pages() -> dict[str, str]:
    """Return the text of every page, by its file name below docs/reference."""
    return {
        "strategies.md": strategies_page(),
        "verbs.md": verbs_page(),
        "settings.md": settings_page(),
        "presets.md": presets_page(),
        "passes.md": passes_page(),
        "messages.md": messages_page(),
        "compatibility.md": compatibility_page(),
        "api.md": api_page(),
    }
