"""`verify GRAPH --config C`: train original and rewrite on the same feeds, and compare all variables and outputs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace

import autograph_rewrite as ar
from autograph_rewrite.tools import common_arguments as common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    common.add_graph(parser)
    common.add_config(parser, plan=True)
    common.add_comparison(parser)


def run(args: argparse.Namespace) -> int:
    """Compare; exit with 1 on a mismatch."""
    chosen = common.config_or_plan(args)
    report = ar.verify(common.load_graph(args), chosen, **common.comparison(args))
    return common.print_verdict(replace(report, advice=tuple(_commands(report.advice, args))), args)


def _commands(advice: Iterable[str], args: argparse.Namespace) -> Iterator[str]:
    """Yield advice with command lines in place of calls; leave `reduce` out for a plan, which fits one graph only."""
    for text in advice:
        call, _, what = text.partition(": ")
        verb = next((one for one in ("bisect", "reduce") if call == f"ar.{one}(item, config)"), None)
        if verb is None:
            yield text
        elif verb != "reduce" or args.plan is None:
            yield f"{common.command_line(verb, args.graph, args)}: {what}"
