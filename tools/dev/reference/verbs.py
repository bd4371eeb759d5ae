"""The verbs of the command line with every option, read from their argument parsers."""

from __future__ import annotations

import argparse

from autograph_rewrite.tools.cli import EPILOG, VERBS, parser_of
from autograph_rewrite.tools.dev.reference.sources import table
from autograph_rewrite.tools.terminal.usage import options_of

HEAD = """\
# Verbs and options

`autograph-rewrite VERB ...`: every verb, from the argument parsers of the command. Every verb takes `--json`, which
prints JSON on standard output, and `--help`. {epilog}.

"""


_EVERYWHERE = ("help", "json")


def verbs_page() -> str:
    """Return the page of the verbs."""
    rows = [("verb", "does"), *((f"[`{verb}`](#{verb})", does) for verb, does in VERBS.items())]
    return "\n".join([HEAD.format(epilog=_sentence(EPILOG)) + table(*rows), *(_verb(verb) for verb in VERBS)])


def _verb(verb: str) -> str:
    own = (action for action in options_of(parser_of(verb)) if action.dest not in _EVERYWHERE)
    rows = [_option(action) for action in own if action.help != argparse.SUPPRESS]
    return f"## {verb}\n\n{_sentence(VERBS[verb])}.\n\n" + (table(("option", "meaning"), *rows) if rows else "")


def _option(action: argparse.Action) -> tuple[str, str]:
    """Return an option, as it is typed, and what it does."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if isinstance(value, tuple):
        value = " ".join(value)
    names = ", ".join(action.option_strings)
    typed = f"{names} {value}".strip() if names else str(value or action.dest)
    if action.choices is not None and action.metavar is None:
        typed = f"{names} {'/'.join(map(str, action.choices))}".strip()
    filled = {**vars(action), "prog": "autograph-rewrite"}
    return f"`{typed}`", (action.help or "").replace("<", "&lt;") % filled


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
