"""`why-not GRAPH VARIABLE STRATEGY`: what a strategy makes of a variable, and why it spreads it no further."""

from __future__ import annotations

import argparse

from autograph_rewrite.tools.common_arguments import (
    add_batch,
    add_config,
    add_graph,
    load_graph,
    print_json,
    read_config,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_graph(parser)
    parser.add_argument("variable", metavar="VARIABLE", help="name of a variable of the graph")
    parser.add_argument(
        "strategy", metavar="STRATEGY", help="a strategy, `model` for the model axis, or a configuration"
    )
    add_config(parser, required=False)
    add_batch(parser)


def run(args: argparse.Namespace) -> int:
    """Print the answer."""
    from autograph_rewrite.inspect.why_not import why_not

    config = read_config(args) if args.config is not None else None
    answer = why_not(load_graph(args), args.variable, args.strategy, config, batch=args.batch)
    if args.json:
        print_json(answer.data())
    else:
        print(answer, end="")
    return 0
