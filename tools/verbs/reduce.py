"""`reduce GRAPH --config C -o OUT.txt`: a graph as small as can be found whose rewrite still fails."""

from __future__ import annotations

import argparse

import autograph_rewrite as ar
from autograph_rewrite.tools import common_arguments as common
from autograph_rewrite.tools.standard_streams import STANDARD


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    common.add_graph(parser)
    common.add_config(parser)
    common.add_comparison(parser, steps=1)
    parser.add_argument("-o", dest="out", metavar="OUT.txt", help="write the graph there instead of printing it (-)")


def run(args: argparse.Namespace) -> int:
    """Write the graph and the command that shows the failure; exit with 1 if there is a failure."""
    config = common.read_config(args)
    found = ar.reduce(common.load_graph(args), config, **common.comparison(args))
    text = ar.dump(found.item, full=True) if found.kind else ""
    out = args.out if args.out != STANDARD else None
    command = common.command_line("verify", out, args) if found.kind and out is not None else ""
    if found.kind and out is not None:
        common.emit(text, out)
    if args.json:
        sizes = {"before": found.before, "after": len(found.item.graph), "tries": found.tries}
        common.print_json({"fails": found.kind, **sizes, "command": command, "text": text})
    elif not found.kind:
        print(found)
    else:
        print(f"# {str(found).partition(chr(10))[0]}")
        print(f"# reproduce: {command}" if command else text)
    return 1 if found.kind else 0
