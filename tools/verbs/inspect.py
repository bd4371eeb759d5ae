"""`inspect GRAPH`: inputs, outputs, variables with their slots and updates, op counts, warnings."""

from __future__ import annotations

import argparse

from autograph_rewrite.inspect.summary import summarise
from autograph_rewrite.tools.common_arguments import add_graph, load_graph, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_graph(parser)


def run(args: argparse.Namespace) -> int:
    """Print the summary."""
    summary = summarise(load_graph(args))
    if args.json:
        print_json(summary.data())
    else:
        print(summary, end="")
    return 0
