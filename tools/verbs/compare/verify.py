"""`verify GRAPH --config C`: train original and rewrite on the same feeds, and compare all variables and outputs."""

from __future__ import annotations

import argparse

import autograph_rewrite as ar
from autograph_rewrite.tools.common_arguments import (
    add_comparison,
    add_config,
    add_graph,
    comparison,
    config_or_plan,
    load_graph,
    print_verdict,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_graph(parser)
    add_config(parser, plan=True)
    add_comparison(parser)


def run(args: argparse.Namespace) -> int:
    """Compare; exit with 1 on a mismatch."""
    chosen = config_or_plan(args)
    return print_verdict(ar.verify(load_graph(args), chosen, **comparison(args)), as_json=args.json)
