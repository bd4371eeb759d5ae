"""`report GRAPH --config C`: write one offline HTML file: the graph after every pass, tables, the predicted step."""

from __future__ import annotations

import argparse
from pathlib import Path

import autograph_rewrite as ar
from autograph_rewrite.tools import common_arguments as common
from autograph_rewrite.tools.launcher.script import at_least
from autograph_rewrite.tools.standard_streams import STANDARD, require_one_result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    common.add_graph(parser)
    common.add_config(parser, plan=True, required=False)
    common.add_batch(parser)
    add("-o", dest="out", metavar="FILE", default="report.html", help="the file (default: report.html), or -")
    add("--task", metavar="K", type=_task, help="show the graph of worker K of a job, or of all (the default)")
    add(
        "--measured",
        metavar="PROFILE",
        help="show measured steps next to the predicted one: a file that `profile` wrote",
    )
    add(
        "--verify",
        action="store_true",
        help="train some steps of both graphs, and write into the page whether they agree",
    )


def run(args: argparse.Namespace) -> int:
    """Rewrite the graph if there is a configuration or plan, and write the file."""
    require_one_result(args)
    common.check_form(args.out, (".html",), "report")
    chosen = common.read_config(args) if args.config is not None else common.optional_plan(args)
    title = "standard input" if args.graph == STANDARD else Path(args.graph).name
    options = {"task": args.task, "measured": args.measured, "verify": args.verify}
    with common.replacing(args.out, ".html") as partial:
        item, batch = common.load_step(args)
        ar.report(item, partial, chosen, **options, batch=batch, title=title)
    if args.out == STANDARD:
        return 0
    if args.json:
        common.print_json({"out": args.out, "bytes": Path(args.out).stat().st_size})
    else:
        print(f"{args.out}: {Path(args.out).stat().st_size:,} bytes, open it in a browser")
    return 0


def _task(text: str) -> int | None:
    """Return the number of a worker; None for all of them."""
    return None if text == "all" else at_least(0)(text)
