"""`verify GRAPH --config C`: train original and rewrite on the same feeds, and compare all variables and outputs."""

from __future__ import annotations

import argparse
from typing import Any

from autograph_rewrite.api import verify
from autograph_rewrite.tools.common_arguments import (
    add_batch,
    add_config,
    add_graph,
    config_or_plan,
    load_graph,
    number_of,
    print_json,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_graph(parser)
    add_comparison(parser)


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """Declare what a graph is rewritten by, and what it is compared with the original on."""
    add_config(parser, plan=True)
    parser.add_argument("--steps", metavar="K", type=number_of("steps"), default=3, help="training steps (default 3)")
    add_batch(parser)
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of the random feeds (default 0)")
    parser.add_argument("--rtol", metavar="R", type=float, default=1e-5, help="relative tolerance (default 1e-5)")


def run(args: argparse.Namespace) -> int:
    """Compare; exit with 1 on a mismatch."""
    chosen = config_or_plan(args)
    report: Any = verify(load_graph(args), chosen, steps=args.steps, seed=args.seed, rtol=args.rtol, batch=args.batch)
    if args.json:
        print_json(report.data())
    else:
        print(report)
    return 0 if report.ok else 1
