"""`why-not GRAPH VARIABLE STRATEGY`: where a strategy puts a variable, and why it does not shard it further."""

from __future__ import annotations

import argparse

from autograph_rewrite.tools import common_arguments as common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    common.add_graph(parser)
    parser.add_argument("variable", metavar="VARIABLE", help="name of a variable of the graph")
    parser.add_argument(
        "strategy", metavar="STRATEGY", help="a strategy, `model` for the model axis, or a configuration"
    )
    common.add_config(parser, required=False)
    common.add_batch(parser)


def run(args: argparse.Namespace) -> int:
    """Print the answer."""
    from autograph_rewrite.inspect.why import why_not

    config = common.read_config(args) if args.config is not None else None
    answer = why_not(common.load_graph(args), args.variable, args.strategy, config, batch=args.batch)
    common.print_found(answer, args)
    return 0
