"""`reduce GRAPH --config C -o OUT.txt`: a graph as small as can be found whose rewrite still fails."""

from __future__ import annotations

import argparse

import autograph_rewrite as ar
from autograph_rewrite.tools.common_arguments import (
    add_comparison,
    add_config,
    add_graph,
    command_line,
    comparison,
    emit,
    load_graph,
    print_json,
    read_config,
)
from autograph_rewrite.tools.standard_streams import STANDARD


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_graph(parser)
    add_config(parser)
    add_comparison(parser, steps=1)
    parser.add_argument("-o", dest="out", metavar="OUT.txt", help="write the graph there instead of printing it (-)")


def run(args: argparse.Namespace) -> int:
    """Write the graph and the command that shows the failure; exit with 1 where there is one."""
    config = read_config(args)
    found = ar.reduce(load_graph(args), config, **comparison(args))
    text = ar.dump(found.item, full=True) if found.kind else ""
    out = args.out if args.out != STANDARD else None
    command = command_line("verify", out, args) if found.kind and out is not None else ""
    if found.kind and out is not None:
        emit(text, out)
    if args.json:
        sizes = {"before": found.before, "after": len(found.item.graph), "tries": found.tries}
        print_json({"fails": found.kind, **sizes, "command": command, "text": text})
    elif not found.kind:
        print(found)
    else:
        print(f"# {str(found).partition(chr(10))[0]}")
        print(f"# reproduce: {command}" if command else text)
    return 1 if found.kind else 0
