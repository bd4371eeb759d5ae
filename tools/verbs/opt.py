"""`opt GRAPH`: run chosen passes on a graph and print the result; for people who write or debug passes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError
from autograph_rewrite.tools import common_arguments as common
from autograph_rewrite.tools.launcher.script import at_least

if TYPE_CHECKING:
    from autograph_rewrite.passes.base.report import PassRecord
    from autograph_rewrite.passes.base.rewriting import Rewrite

FOLDED = "update-rows"
"""The last pass that leaves a folded graph to print."""
ALONE = {"devices": ["CPU:0"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("graph", metavar="GRAPH", nargs="?", help=common.GRAPH_HELP)
    common.add_names(parser)
    common.add_config(parser, plan=True, required=False)
    add("--list", action="store_true", help="list all passes, and do nothing else")
    add("--passes", metavar="A,B,...", type=names, default=(), help="run these, in this order")
    add("--stop-after", metavar="PASS", help=f"the last pass to run (default: {FOLDED})")
    add("--skip", metavar="A,B,...", type=names, default=(), help="leave these passes out")
    add("--print-before", metavar="A,B,...", type=names, default=(), help="print the graph before them")
    add("--print-after", metavar="A,B,...", type=names, default=(), help="print the graph after them")
    add("--time-passes", action="store_true", help="say on standard error what each pass took")
    add("--full", action="store_true", help="print every attribute, constant and function")
    add("--task", metavar="K", type=at_least(0), default=0, help="the graph of worker K")
    add("--no-verify", action="store_true", help="do not check the graph after each pass")
    add("-o", dest="out", metavar="FILE", help="write there instead of printing")


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(args: argparse.Namespace) -> int:
    """Run the passes, and print the resulting graph."""
    if args.list:
        return _list(as_json=args.json)
    if args.graph is None:
        raise GraphError("no graph is named", hint="autograph-rewrite opt GRAPH, or opt --list")
    from autograph_rewrite.inspect.pass_states import text_of

    rewrite = _optimized(args)
    text = text_of(rewrite, full=args.full)
    if args.json:
        common.print_json({"passes": [_data(record) for record in rewrite.records], "text": text})
    else:
        common.emit(text, args.out)
    if args.time_passes:
        print(_times(rewrite.records), file=sys.stderr, end="")
    return 0


def _optimized(args: argparse.Namespace) -> Rewrite:
    """Run the chosen passes on the graph."""
    from autograph_rewrite.analysis.propagate import Propagation
    from autograph_rewrite.compile import request, with_processes
    from autograph_rewrite.inspect.pass_states import PrintedPasses, optimize, require_unfolded
    from autograph_rewrite.normalize.normalize import normalise, normalise_original
    from autograph_rewrite.passes.base.pass_manager import require_known, select
    from autograph_rewrite.passes.pass_pipeline import PIPELINE
    from autograph_rewrite.passes.user_passes import with_user_passes
    from autograph_rewrite.tools.reproducer import reproducible

    stop = args.stop_after or (None if args.passes else FOLDED)
    chosen = common.config_or_plan(args) if args.config or args.plan else ar.Config.of(ALONE)
    loaded = common.load_graph(args)
    require_unfolded(loaded)
    # A graph with placements may be the output of passes, so nodes that passes made do not mean that it is rewritten.
    item = normalise(loaded) if loaded.placements else normalise_original(loaded)
    plan = chosen if isinstance(chosen, ar.Plan) else request(item, with_processes(chosen))
    known = with_user_passes(PIPELINE, plan)
    given = (Propagation,) if item.placements else ()
    passes = select(known, only=args.passes, stop_after=stop, skip=args.skip, given=given)
    require_known((*args.print_before, *args.print_after), known)
    shown = PrintedPasses(args.print_before, args.print_after, full=args.full)
    with reproducible(item, plan, args.task):
        return optimize(item, plan, passes, task=args.task, shown=shown, verify=not args.no_verify)


def _list(*, as_json: bool) -> int:
    from autograph_rewrite.inspect.table import drawn, table
    from autograph_rewrite.passes.pass_pipeline import PIPELINE

    if as_json:
        common.print_json([{"name": one.name, "summary": one.summary} for one in PIPELINE])
    else:
        print(drawn(table("passes", ("pass", "what it does"), [(one.name, one.summary) for one in PIPELINE])), end="")
    return 0


def _data(record: PassRecord) -> dict[str, object]:
    return {"name": record.name, "seconds": record.seconds, "added": record.added, "removed": record.removed}


def _times(records: Sequence[PassRecord]) -> str:
    from autograph_rewrite.inspect.table import drawn, table

    rows = [(one.name, f"{one.seconds * 1e3:.1f}", one.added, one.removed) for one in records]
    total = f"{sum(one.seconds for one in records) * 1e3:.1f}"
    return drawn(table("passes", ("pass", "#ms", "#added", "#removed"), [*rows, ("all", total, "", "")]))
