"""`plan GRAPH --config C`: run the strategy builder, and print or write its plan with every reshard edge."""

from __future__ import annotations

import argparse

import autograph_rewrite as ar
from autograph_rewrite.tools import common_arguments as common
from autograph_rewrite.tools.standard_streams import STANDARD, aside, require_one_result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    common.add_graph(parser)
    common.add_config(parser)
    common.add_batch(parser)
    parser.add_argument("-o", dest="out", metavar="PLAN", help="write the plan there: .yaml or .pb; - prints it")


def run(args: argparse.Namespace) -> int:
    """Build the plan."""
    from autograph_rewrite.inspect.table import ranking_text
    from autograph_rewrite.plan.parts.names import exchanged_bytes

    require_one_result(args)
    config = common.read_config(args)
    with common.plan_file(args.out) as partial:
        item, batch = common.load_step(args)
        plan = ar.build_plan(item, config, batch=batch)
        if partial is not None:
            plan.save(partial)
    if args.json:
        common.print_json(as_data(plan))
    elif args.out is None:
        print("".join(f"# {line}\n" for line in ranking_text(plan.notes).splitlines()) + plan.to_yaml(), end="")
    else:
        name = "standard output" if args.out == STANDARD else args.out
        print(
            f"{name}: {len(plan.edges)} reshards for {plan.replicas} replicas ({plan.mode}); each member hands over "
            f"{exchanged_bytes(plan.edges):,} bytes in a step of {plan.batch:,} examples",
            file=aside(args),
        )
        print(ranking_text(plan.notes), end="", file=aside(args))
    return 0


def as_data(plan: ar.Plan) -> object:
    """Return a plan as plain data: the JSON form of plan.proto, and its ranking in a search."""
    from google.protobuf import json_format

    from autograph_rewrite.plan.parts.names import exchanged_bytes
    from autograph_rewrite.plan.parts.notes import ranking

    data = json_format.MessageToDict(plan.to_proto(), preserving_proto_field_name=True)
    rows = ranking(plan.notes)
    data |= {"exchanged_bytes": exchanged_bytes(plan.edges)}
    return {**data, "ranking": rows} if rows else data
