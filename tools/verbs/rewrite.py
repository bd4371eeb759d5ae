"""`rewrite GRAPH`: write the distributed graph; with `--dump-dir`, also the graph after every pass."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import autograph_rewrite as ar
from autograph_rewrite.tools import common_arguments as common
from autograph_rewrite.tools.launcher.script import at_least
from autograph_rewrite.tools.standard_streams import STANDARD, aside, require_one_result

if TYPE_CHECKING:
    from autograph_rewrite.inspect.pass_states import PassSnapshots
    from autograph_rewrite.inspect.report_view import Account


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    common.add_graph(parser)
    common.add_config(parser, plan=True)
    text = "the result: .ar, .pb or .pbtxt, or - for standard output (as .ar)"
    add("-o", dest="out", metavar="OUT", required=True, help=text)
    add("--plan-out", metavar="PLAN", help="write the resolved plan there: .yaml or .pb")
    add("--dump-dir", metavar="DIR", help="write NN_pass.pb, .txt and .json there, one for each pass")
    add("--print-changed", action="store_true", help="print what each pass changes")
    add("--task", metavar="K", type=at_least(0), help="write the graph of worker K of the configuration's cluster")
    common.add_batch(parser)
    add("--no-verify", action="store_true", help="do not check the graph after each pass")


def run(args: argparse.Namespace) -> int:
    """Rewrite; write files only if everything succeeds."""
    from autograph_rewrite.inspect.pass_states import Changes
    from autograph_rewrite.inspect.report_view import account_of
    from autograph_rewrite.tools.reproducer import reproducible

    require_one_result(args)
    chosen = common.config_or_plan(args)
    stream, observers = aside(args), list[Any]()
    common.check_form(args.out, common.GRAPH_FORMS, "graph")
    with ExitStack() as stack:  # opens all outputs first, so that a path that cannot be written fails early
        out = stack.enter_context(common.replacing(args.out, common.GRAPH_FORMS[0]))
        plan_out = stack.enter_context(common.plan_file(args.plan_out))
        snapshots = stack.enter_context(_snapshots(args.dump_dir))
        item, batch = common.load_step(args)
        if args.print_changed:
            observers.append(Changes(item.graph, lambda text: print(text, file=stream)))
        observers += [] if snapshots is None else [snapshots]
        with reproducible(item, chosen, args.task or 0):
            new = ar.rewrite(
                item, chosen, verify_each=not args.no_verify, observers=observers, task=args.task, batch=batch
            )
        common.write_item(new, out)
        if plan_out is not None:
            new.report.plan.save(plan_out)
        if snapshots is not None:
            snapshots.keep("expand", new.graph, new.placements)
            snapshots.publish()
    if args.json:
        common.print_json(_data(account_of(new), args.out))
    else:
        print("standard output:" if args.out == STANDARD else f"{args.out}:", file=stream)
        print(new.report, file=stream)
    return 0


@contextmanager
def _snapshots(folder: str | None) -> Iterator[PassSnapshots | None]:
    if folder is None:
        yield None
        return
    from autograph_rewrite.inspect.pass_states import PassSnapshots

    snapshots = PassSnapshots(Path(folder))
    try:
        yield snapshots
    finally:
        snapshots.discard()


def _data(account: Account, out: str) -> dict[str, Any]:
    return {
        "out": out,
        **common.account_data(account),
        "nodes_before": account.report.nodes_before,
        "nodes_after": account.report.nodes_after,
        "seconds": account.report.seconds,
        "passes": [vars(one) for one in account.report.passes],
        "reshards": len(account.edges),
    }
