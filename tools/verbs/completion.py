"""`completion SHELL`: print the script that lets bash, zsh or fish complete verbs, options, configurations and files.

    eval "$(autograph-rewrite completion bash)"          in ~/.bashrc; zsh: the same with zsh, in ~/.zshrc
    autograph-rewrite completion fish > ~/.config/fish/completions/autograph-rewrite.fish

The script contains all words, so that the shell completes without starting Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from autograph_rewrite.config import presets
from autograph_rewrite.tools import cli
from autograph_rewrite.tools.common_arguments import print_json

PROGRAM = "autograph-rewrite"
SHELLS = ("bash", "zsh", "fish")


class Option(NamedTuple):
    """An option of a verb: its names, its values (None: it takes none; empty: any, as a file), and its help."""

    names: tuple[str, ...]
    values: tuple[str, ...] | None
    help: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    verbs = {verb: (cli.VERBS[verb], _options(verb)) for verb in cli.available_verbs()}
    if args.json:
        print_json(
            {verb: [name for option in options for name in option.names] for verb, (_, options) in verbs.items()}
        )
    else:
        print(*(_fish(verbs) if args.shell == "fish" else _bash(verbs, is_zsh=args.shell == "zsh")), sep="\n")
    return 0


def _options(verb: str) -> list[Option]:
    return [
        _option(action) for action in cli.options_of(cli.parser_of(verb)) if action.option_strings or action.choices
    ]


def _option(action: argparse.Action) -> Option:
    values = tuple(map(str, action.choices)) if action.choices is not None else ()
    if action.dest == "config":
        values = presets.names()
    takes = values if action.nargs != 0 else None
    return Option(tuple(action.option_strings), takes, str(action.help or "").partition("\n")[0])


Verbs = dict[str, tuple[str, list[Option]]]


def _bash(verbs: Verbs, *, is_zsh: bool) -> Iterator[str]:
    """Yield a bash script, which zsh runs by its module bashcompinit."""
    if is_zsh:
        yield "autoload -U +X compinit && compinit -i"
        yield "autoload -U +X bashcompinit && bashcompinit"
    yield "_autograph_rewrite() {"
    yield '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""'
    yield '  if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f"    words={shlex.quote(' '.join([*verbs, '--help', '--version']))}"
    yield "  else"
    yield '    case "${COMP_WORDS[1]} $before" in'
    for values, places in _places(verbs).items():
        yield f"      {'|'.join(map(shlex.quote, places))}) words={shlex.quote(' '.join(values))} ;;"
    yield "    esac"
    yield '    if [ -z "$words" ]; then case "$word" in -*) case "${COMP_WORDS[1]}" in'
    for verb, (_, options) in verbs.items():
        names = " ".join(name for option in options for name in option.names)
        yield f"      {verb}) words={shlex.quote(names)} ;;"
    yield "    esac ;; esac; fi"
    yield "  fi"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield '  if [ "$COMP_CWORD" -gt 1 ] && [ "${word#-}" = "$word" ]; then COMPREPLY+=($(compgen -f -- "$word")); fi'
    yield "}"
    yield f"complete -o filenames -F _autograph_rewrite {PROGRAM}"


def _places(verbs: Verbs) -> dict[tuple[str, ...], list[str]]:
    """Return the verb and option after which values may follow, by these values; for an argument, only the verb."""
    found: dict[tuple[str, ...], list[str]] = {}
    for verb, (_, options) in verbs.items():
        for option in options:
            if option.values:
                found.setdefault(option.values, []).extend(f"{verb} {name}" for name in option.names or (verb,))
    return found


def _fish(verbs: Verbs) -> Iterator[str]:
    for verb, (text, options) in verbs.items():
        yield f"complete -c {PROGRAM} -n __fish_use_subcommand -f -a {verb} -d {shlex.quote(text)}"
        seen = f"-n '__fish_seen_subcommand_from {verb}'"
        for option in options:
            names = " ".join(f"-l {one[2:]}" if one.startswith("--") else f"-s {one[1:]}" for one in option.names)
            values = f" -a {shlex.quote(' '.join(option.values))}" if option.values else ""
            takes = f" -r{values}" if option.values is not None and option.names else values
            yield f"complete -c {PROGRAM} {seen} {names}{takes} -d {shlex.quote(option.help)}"
