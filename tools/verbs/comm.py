"""`comm GRAPH`: collectives and merges, with members, order and bytes per step."""

from __future__ import annotations

import argparse

from autograph_rewrite.tools.common_arguments import add_graph, load_graph, optional_plan, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_graph(parser)
    parser.add_argument("--plan", metavar="PLAN", help="the plan of the rewrite, for sizes and owners")
    parser.add_argument("--all", action="store_true", help="write out all names of long lists")


def run(args: argparse.Namespace) -> int:
    """Print the exchanges."""
    from autograph_rewrite.inspect.communication import EXCHANGE, counted_batch, meetings, report

    item, plan = load_graph(args), optional_plan(args)
    found, batch = meetings(item, plan), counted_batch(item, plan)
    if args.json:
        exchanged = sum(one.bytes or 0 for one in found if one.role == EXCHANGE)
        print_json({"batch": batch, "exchanged_bytes": exchanged, "exchanges": [meeting.data() for meeting in found]})
    else:
        print(report(found, batch, every=args.all), end="")
    return 0
