"""`dump GRAPH`: the graph as text, table, JSON, picture or web page."""

from __future__ import annotations

import argparse
from typing import get_args

import autograph_rewrite as ar
from autograph_rewrite.inspect.forms import Form
from autograph_rewrite.tools.common_arguments import add_graph, emit, load_graph, optional_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add_graph(parser)
    add("--format", choices=sorted(get_args(Form)), default=None, help="default: text (json with --json)")
    add("--full", action="store_true", help="text with every attribute, constant and function")
    add("--op", metavar="RE", help="only op types with this regular expression in them")
    add("--name", metavar="RE", help="only nodes with this regular expression in their name")
    add("--device", metavar="RE", help="only nodes with this regular expression in their device")
    add("--around", metavar="NODE", help="only the nodes around this one")
    add("--depth", metavar="K", type=int, default=2, help="how many edges away --around reaches (default 2)")
    add("--plan", metavar="PLAN", help="the plan of the rewrite, which a .pb file does not hold")
    add("-o", dest="out", metavar="FILE", help="write there instead of printing")


def run(args: argparse.Namespace) -> int:
    """Print or write the graph."""
    text = ar.dump(
        load_graph(args),
        args.format or ("json" if args.json else "text"),
        op=args.op,
        name=args.name,
        device=args.device,
        around=args.around,
        depth=args.depth,
        full=args.full,
        plan=optional_plan(args),
    )
    emit(text, args.out)
    return 0
