"""Mistyped words of a command line: a verb or an option that is not known names the one that was meant.

autograph-rewrite verfy g.pb            there is no verb 'verfy': did you mean 'verify'?
autograph-rewrite plan g.pb --confg C   there is no option '--confg': did you mean '--config'?
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NoReturn

from autograph_rewrite.tools.output_pipes import escaped


class Parser(argparse.ArgumentParser):
    """A parser whose complaints show the control characters of what was typed, or came from a list of files."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end the program."""
        super().error(escaped(message))


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a parser knows of a line, options and positional arguments."""
    return parser._actions  # argparse has no other way to ask


def require_known_verb(parser: argparse.ArgumentParser, argv: Sequence[str], verbs: Sequence[str]) -> None:
    """End the program where the first word is neither a verb nor an option."""
    if argv and not argv[0].startswith("-") and argv[0] not in verbs:
        parser.error(f"there is no verb '{argv[0]}': {_closest(argv[0], verbs, 'verbs')}")


def require_known_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """End the program where a word looks like a long option and none begins so.

    Args:
        parser: of the verb.
        words: what follows it. A script's own arguments are its own.
    """
    by_name = {name: action for action in options_of(parser) for name in action.option_strings}
    for name in _long_options(by_name, words, takes_rest=_takes_rest(parser)):
        if not any(known.startswith(name) for known in by_name):
            known = [one for one in by_name if one.startswith("--")]
            parser.error(f"there is no option '{name}': {_closest(name, known, 'options')}")


def _closest(word: str, known: Sequence[str], noun: str) -> str:
    from autograph_rewrite.diagnostics.faults import did_you_mean  # it takes as long as all of --help

    return did_you_mean(word, known, noun=noun)


def _takes_rest(parser: argparse.ArgumentParser) -> bool:
    return any(action.nargs == argparse.REMAINDER for action in options_of(parser))


def _long_options(by_name: dict[str, argparse.Action], words: Sequence[str], *, takes_rest: bool) -> Iterator[str]:
    """Yield the long options among words, without what they are given."""
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        action = by_name.get(name)
        if word == "--" or (takes_rest and not word.startswith("-")):
            return
        if word.startswith("--"):
            yield name
        if action is not None and action.nargs != 0 and not equals:
            next(rest, None)
