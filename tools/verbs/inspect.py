"""`inspect GRAPH`: inputs, outputs, variables with slots and updates, op counts, warnings; or how it uses GPUs."""

from __future__ import annotations

import argparse

from autograph_rewrite.errors import GraphError
from autograph_rewrite.tools.common_arguments import add_batch, add_graph, load_graph, print_found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_graph(parser)
    parser.add_argument(
        "--accelerator",
        action="store_true",
        help="show which nodes have no kernel on a GPU, and what crosses between host and device in every step",
    )
    parser.add_argument(
        "--before",
        metavar="ORIGINAL",
        help="with --accelerator: the original graph, to tell what the rewrite has added",
    )
    add_batch(parser)


def run(args: argparse.Namespace) -> int:
    """Print the summary."""
    from autograph_rewrite.inspect.accelerator import accelerator_use
    from autograph_rewrite.inspect.summary import summarise

    if args.before is not None and not args.accelerator:
        raise GraphError("--before is for --accelerator", hint="add it; `diff` compares two graphs")
    item = load_graph(args)
    if args.accelerator:
        before = None if args.before is None else load_graph(args, args.before)
        print_found(accelerator_use(item, before, args.batch), args)
    else:
        print_found(summarise(item), args)
    return 0
