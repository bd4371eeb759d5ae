"""`bisect GRAPH --config C`: the first pass after which `verify` fails, and the first wrong value and edge."""

from __future__ import annotations

import argparse

import autograph_rewrite as ar
from autograph_rewrite.tools.common_arguments import comparison, config_or_plan, load_graph, print_verdict
from autograph_rewrite.tools.verbs import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, which are those of `verify`."""
    verify.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Search for it; exit with 1 if `verify` fails."""
    chosen = config_or_plan(args)
    return print_verdict(ar.bisect(load_graph(args), chosen, **comparison(args)), args)
