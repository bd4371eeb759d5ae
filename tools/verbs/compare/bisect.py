"""`bisect GRAPH --config C`: the first pass behind which `verify` fails, and the first wrong value and edge."""

from __future__ import annotations

import argparse
from typing import Any

from autograph_rewrite.api import bisect
from autograph_rewrite.tools.common_arguments import add_graph, config_or_plan, load_graph, print_json
from autograph_rewrite.tools.verbs.compare.verify import add_comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_graph(parser)
    add_comparison(parser)


def run(args: argparse.Namespace) -> int:
    """Look for it; exit with 1 where `verify` fails."""
    chosen = config_or_plan(args)
    found: Any = bisect(load_graph(args), chosen, steps=args.steps, seed=args.seed, rtol=args.rtol, batch=args.batch)
    if args.json:
        print_json(found.data())
    else:
        print(found)
    return 0 if found.ok else 1
