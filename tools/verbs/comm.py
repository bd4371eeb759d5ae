"""`comm GRAPH [--config C]`: collectives and merges, with members, order and bytes per step."""

from __future__ import annotations

import argparse

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError
from autograph_rewrite.tools import common_arguments as common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    common.add_graph(parser)
    common.add_config(parser, plan=True, required=False)
    common.add_batch(parser)
    parser.add_argument("--all", action="store_true", help="write out all names of long lists")


def run(args: argparse.Namespace) -> int:
    """Rewrite the graph if there is a configuration, and print the exchanges."""
    from autograph_rewrite.inspect.communication import EXCHANGE, counted_batch, meetings, report
    from autograph_rewrite.inspect.report import is_rewritten

    plan = common.optional_plan(args)
    config = common.read_config(args) if args.config is not None else None
    item, batch = common.load_step(args)
    if config is not None:
        item = ar.rewrite(item, config, batch=batch)
    found, batch = meetings(item, plan), counted_batch(item, plan)
    if not (found or item.report or is_rewritten(item.graph)):
        hint = "give --config, or what `autograph-rewrite rewrite GRAPH --config CONFIG -o OUT.ar` wrote"
        raise GraphError("this graph exchanges nothing: it is not rewritten", hint=hint)
    if args.json:
        exchanged = sum(one.bytes or 0 for one in found if one.role == EXCHANGE)
        shown = [meeting.data() for meeting in found]
        common.print_json({"batch": batch, "exchanged_bytes": exchanged, "exchanges": shown})
    else:
        print(report(found, batch, every=args.all), end="")
    return 0
