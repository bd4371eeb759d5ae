"""`explain GRAPH --config C`: say in sentences what a rewrite does, what is divided, and what is replicated."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import autograph_rewrite as ar
from autograph_rewrite.tools import common_arguments as common

if TYPE_CHECKING:
    from autograph_rewrite.inspect.report_view import Account


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    common.add_graph(parser)
    common.add_config(parser, plan=True)
    common.add_batch(parser)


def run(args: argparse.Namespace) -> int:
    """Rewrite, and explain it; nothing is written."""
    from autograph_rewrite.inspect.explain import text_of
    from autograph_rewrite.inspect.report_view import account_of
    from autograph_rewrite.inspect.table import fitted
    from autograph_rewrite.views import where_time_goes

    chosen = common.config_or_plan(args)
    item, batch = common.load_step(args)
    new = ar.rewrite(item, chosen, batch=batch)
    account = account_of(new)
    if args.json:
        common.print_json(_data(account))
    else:
        print(fitted(text_of(account)), where_time_goes(item, new.report.plan, chosen, batch), sep="", end="")
    return 0


def _data(account: Account) -> dict[str, Any]:
    from autograph_rewrite.plan.parts.notes import ranking

    return {
        **common.account_data(account),
        "devices": [list(own) for own in account.devices],
        "flops": account.covered.flops,
        "bytes_of_batch": account.batch,
        "exchanged_bytes": account.exchanged_bytes,
        "exchanges": [
            {"value": edge.value, "owner": edge.owner, "by": edge.means, "bytes": edge.bytes, "reason": edge.reason}
            for edge in account.edges
            if edge.kind != "local"
        ],
        "inexact": [vars(note) for note in account.report.inexact],
        "ranking": ranking(account.ranking),
    }
