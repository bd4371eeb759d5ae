"""`why GRAPH NODE`: which pass made a node, for which original one, and which reshard of the plan is behind it."""

from __future__ import annotations

import argparse

from autograph_rewrite.inspect.why import why
from autograph_rewrite.tools.common_arguments import add_graph, load_graph, optional_plan, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_graph(parser)
    parser.add_argument("node", metavar="NODE", help="name of a node of the graph")
    parser.add_argument("--plan", metavar="PLAN", help="the plan of the rewrite (`rewrite --plan-out`), for its edges")


def run(args: argparse.Namespace) -> int:
    """Print the reason."""
    reason = why(load_graph(args), args.node, optional_plan(args))
    if args.json:
        print_json(reason.data())
    else:
        print(reason, end="")
    return 0
