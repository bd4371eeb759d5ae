"""`diff A B`: the changes from one graph to another: nodes added, removed, copied, rewired, moved."""

from __future__ import annotations

import argparse

import autograph_rewrite as ar
from autograph_rewrite.tools.common_arguments import GRAPH_HELP, add_names, load_graph, print_found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("a", metavar="A", help=GRAPH_HELP)
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 when the graphs differ")
    add_names(parser)


def run(args: argparse.Namespace) -> int:
    """Print the differences."""
    found = ar.diff(load_graph(args, args.a), load_graph(args, args.b))
    print_found(found, args)
    return 1 if args.exit_code and found else 0
