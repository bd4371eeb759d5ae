"""`why GRAPH NODE`: which pass made a node, and why its value is placed as it is, from the batch input on."""

from __future__ import annotations

import argparse

import autograph_rewrite as ar
from autograph_rewrite.tools import common_arguments as common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    common.add_graph(parser)
    parser.add_argument("node", metavar="NODE", help="a node, a value (`name:1`) or a variable, of either graph")
    common.add_config(parser, plan=True, required=False)
    common.add_batch(parser)


def run(args: argparse.Namespace) -> int:
    """Print the reason."""
    from autograph_rewrite.inspect.why import why

    item, plan = common.load_graph(args), common.optional_plan(args)
    if args.config is not None:
        item = ar.rewrite(item, common.read_config(args), batch=args.batch)
    reason = why(item, args.node, plan)
    common.print_found(reason, args)
    return 0
