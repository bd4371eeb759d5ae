"""`simulate GRAPH --config C`: predict step time, memory and communication; nothing is rewritten or run."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import autograph_rewrite as ar
from autograph_rewrite.tools import common_arguments as common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    common.add_graph(parser)
    common.add_config(parser, plan=True)
    common.add_batch(parser)
    add("--trace", metavar="OUT", help="write a trace for Chrome or Perfetto there (.json)")
    add(
        "--memory",
        metavar="OUT",
        help="write the memory of each device over time there, with and without recomputation, and who holds it at the "
        "peak (.svg or .json)",
    )
    add("--calibrate", action="store_true", help="measure this machine's CPU first (a few seconds)")


def run(args: argparse.Namespace) -> int:
    """Simulate one step."""
    from autograph_rewrite.config.config import Config
    from autograph_rewrite.cost.hardware.calibrate import calibrate
    from autograph_rewrite.cost.levers import levers
    from autograph_rewrite.cost.simulate import network_of, simulate
    from autograph_rewrite.inspect import explain
    from autograph_rewrite.inspect.explain import where_time_goes
    from autograph_rewrite.inspect.table import ranking_text
    from autograph_rewrite.normalize.normalize import normalise
    from autograph_rewrite.plan.parts.notes import ranking
    from autograph_rewrite.views import requested

    if args.memory is not None:
        common.check_form(args.memory, (".svg", ".json"), "memory")
    given = common.optional_plan(args) or common.read_config(args)
    loaded, batch = common.load_step(args)
    item = normalise(loaded)
    config = given if isinstance(given, Config) else None
    plan, network = requested(item, given, batch), network_of(config)
    machine = calibrate() if args.calibrate else None
    step = simulate(item, plan, network, batch=batch, machine=machine)
    found = step.found
    if args.trace is not None:
        common.emit(json.dumps(found.trace()), args.trace)
    if args.memory is not None:
        steps = {"after": found}
        if plan.remat is not None:
            kept = replace(plan, remat=None, edges=())
            steps = {"before": ar.simulate(item, kept, network, batch=batch, machine=machine), **steps}
        is_data = args.memory.lower().endswith(".json")
        common.emit(json.dumps(explain.data(steps)) if is_data else explain.to_svg(steps), args.memory)
    if args.json:
        rows = ranking(plan.notes)
        common.print_json({**found.data(), "ranking": rows} if rows else found.data())
    else:
        print(found)
        print(where_time_goes(found, levers(step, config)).partition("\n")[2])
        print(ranking_text(plan.notes), end="")
    return 0
