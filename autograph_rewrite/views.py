"""The public functions that show and check a rewrite: explain, verify, bisect, reduce, report, simulate.

Each takes an item, a target of `distribute`, or the result of `distribute`:

    ar.verify(item, "fsdp")      ar.verify(model, "fsdp", specs=(x, y))      ar.verify(step)  # distributed, has run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autograph_rewrite.api import rewrite
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.config.sections import Cluster, Network
from autograph_rewrite.diagnostics.files import write_whole
from autograph_rewrite.diagnostics.progress_line import stage
from autograph_rewrite.errors import ConfigError, GraphError, RewriteError
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.notebook import Shown, ShownFile
from autograph_rewrite.passes.base.pass_manager import Observer
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.selected import chosen
from autograph_rewrite.training_graph import RewrittenTrace, TrainingGraph

if TYPE_CHECKING:
    from autograph_rewrite.check.bisect import Bisection
    from autograph_rewrite.check.reduce import Reduction
    from autograph_rewrite.check.report import VerifyReport
    from autograph_rewrite.cost.hardware.machine import Machine
    from autograph_rewrite.cost.simulate import SimulatedStep
    from autograph_rewrite.cost.tasks.result import Simulation
    from autograph_rewrite.inspect.profile import Profile

Feeds = Sequence[Mapping[Any, Any]] | Mapping[Any, Any]
"""A dict of values by input name for each step, or one for all steps."""


def explain(
    new: Any, config: ConfigLike | Plan | None = None, *, batch: int | None = None, specs: Sequence[Any] = ()
) -> Shown:
    """Explain a rewrite in sentences: what was rewritten, what is divided, what runs whole, why, and what it costs.

    Args:
        new: a rewritten item, or a distributed function or Keras model that has run, all of whose traces are explained.
            With `config`, it may also be an original, as for `verify`.
        config: the configuration or plan by which an original is rewritten.
        batch: examples of all devices together, where the graph leaves that open.
        specs: as for `verify`.

    Raises:
        GraphError: `new` was not rewritten.
    """
    from autograph_rewrite.inspect.explain import explain as run

    traces, given = _traces(new, specs), None
    if config is not None:
        original, given = traces[0].original, chosen(config)
        traces = [RewrittenTrace(original, rewrite(original, given, batch=batch))]
    texts = []
    for original, rewritten in traces:
        more = where_time_goes(original, rewritten.report.plan, given, batch) if original is not rewritten else ""
        texts.append(run(rewritten, batch=batch) + more)
    return Shown("\n".join(texts))


def where_time_goes(item: TrainingGraph, plan: Plan, given: Config | Plan | None, batch: int | None = None) -> str:
    """Return text on the time and memory of the predicted step, by layer, or on why it cannot be predicted.

    Args:
        item: the original.
        plan: the plan by which it is rewritten.
        given: the source of the plan; a configuration gives the speed of the network and the alternatives.
        batch: examples of a step; None: those of the graph, else 32 for each replica.
    """
    from autograph_rewrite.cost.levers import levers
    from autograph_rewrite.inspect.explain import where_time_goes as run

    config = given if isinstance(given, Config) else None
    try:
        step = simulated_step(item, plan, config, batch=batch)
        return run(step.found, levers(step, config))
    except RewriteError as error:
        return f"The step cannot be predicted: {error.problem}.\n"


def verify(
    item: Any,
    config: ConfigLike | Plan | None = None,
    *,
    steps: int = 3,
    feeds: Feeds | None = None,
    rtol: float = 1e-5,
    atol: float | None = None,
    seed: int = 0,
    batch: int | None = None,
    specs: Sequence[Any] = (),
) -> VerifyReport:
    """Train the rewritten item and the original on the same feeds from the same values, and compare.

    Args:
        item: the original; or a distributed function or Keras model that has run, whose first trace is compared,
            starting from the present values of its variables; or, with `specs`, a target of `distribute`.
        config: file, dict, `Config`, plan or name of a shipped configuration to rewrite it by; default: the plan of a
            distributed function or model, else the configuration of `run --config` or `launch --config`.
        steps: how many to train.
        feeds: default: random ones.
        rtol: allowed error, relative to the largest value of each tensor.
        atol: allowed error of tensors that are nearly zero; default: it follows from `rtol`.
        seed: of random feeds, and of random ops that have none.
        batch: examples per step of random feeds; default: an odd prime, so that replicas get uneven blocks.
        specs: `tf.TensorSpec`s or arrays that a function or a compiled Keras model is traced for.

    Returns:
        The report; a mismatch is `ok == False`, no exception.

    Raises:
        RewriteError: the item cannot be rewritten, or the original cannot be trained on these feeds.
    """
    from autograph_rewrite.check.side_by_side import TrialSettings
    from autograph_rewrite.check.verify import verify as run

    return run(*_compared(item, config, specs), TrialSettings(steps, feeds, rtol, atol, seed, batch))


def bisect(
    item: Any,
    config: ConfigLike | Plan | None = None,
    *,
    steps: int = 3,
    feeds: Feeds | None = None,
    rtol: float = 1e-5,
    atol: float | None = None,
    seed: int = 0,
    batch: int | None = None,
    specs: Sequence[Any] = (),
    observers: Sequence[Observer] = (),
) -> Bisection:
    """Find the first pass after which `verify` fails, and the first value and edge that are wrong.

    Args:
        item: as for `verify`, as are all others but `observers`.
        config: the configuration or plan to rewrite it by.
        steps: how many to train.
        feeds: default: random ones.
        rtol: allowed error.
        atol: allowed error of tensors that are nearly zero.
        seed: of random feeds.
        batch: examples per step of random feeds.
        specs: the specs for which a function or a model is traced.
        observers: called with (pass name, folded graph) after every pass, as in `rewrite`.

    Returns:
        The result; `ok` if nothing fails.

    Raises:
        RewriteError: as for `verify`.
    """
    from autograph_rewrite.check.bisect import bisect as run
    from autograph_rewrite.check.side_by_side import TrialSettings

    return run(*_compared(item, config, specs), TrialSettings(steps, feeds, rtol, atol, seed, batch), observers)


def reduce(
    item: Any,
    config: ConfigLike | None = None,
    *,
    steps: int = 1,
    seed: int = 0,
    batch: int | None = None,
    rtol: float = 1e-5,
    specs: Sequence[Any] = (),
    observers: Sequence[Observer] = (),
) -> Reduction[GraphItem]:
    """Return a small graph whose rewrite fails in the same way as an item's, on random feeds.

    Args:
        item: as for `verify`.
        config: as for `rewrite`, but no plan, because a plan fits one graph only.
        steps: how many to train.
        seed: of random feeds.
        batch: examples per step.
        rtol: allowed error, as for `verify`.
        specs: as for `verify`.
        observers: called with (pass name, folded graph) after every pass, as in `rewrite`.

    Returns:
        The graph as `item`; `kind` says how its rewrite fails, and is empty if it does not.

    Raises:
        ConfigError: a plan is given.
        RewriteError: as for `rewrite`.
    """
    from autograph_rewrite.check.reduce import Reduction
    from autograph_rewrite.check.reduce import reduce as run
    from autograph_rewrite.check.side_by_side import TrialSettings

    given = chosen(config)
    if isinstance(given, Plan):
        raise ConfigError("a plan is of one graph, not of what becomes of it", hint="give a configuration")
    original = _traces(item, specs)[0].original
    found = run(original, given, TrialSettings(steps, rtol=rtol, seed=seed, batch=batch), observers)
    return Reduction(GraphItem.of(found.item), found.kind, found.before, found.tries)


def simulate(
    item: Any,
    plan: ConfigLike | Plan | None = None,
    cluster: ConfigLike | Cluster | Network | None = None,
    *,
    batch: int | None = None,
    machine: Machine | None = None,
    specs: Sequence[Any] = (),
) -> Simulation:
    """Predict the time, memory and traffic of one step.

    Args:
        item: a training graph, which is not changed; or as for `verify`.
        plan: a request or a resolved plan for it, or a configuration; default: as for `verify`.
        cluster: the speed of the network, as a configuration or its `cluster` or `network` section; default: that of
            the configuration given as `plan`.
        batch: examples of all replicas together; default: the size in the graph, else 32 for each replica.
        machine: the speed of the devices; default: round figures. `calibrate()` measures this machine.
        specs: as for `verify`.

    Raises:
        GraphError: the graph has no batch input, or it has been distributed already.
        PlanError: the plan does not fit this graph.
        ConfigError: the configuration is wrong.
    """
    original, given = _compared(item, plan, specs)
    return simulated_step(original, given, cluster, batch=batch, machine=machine).found


def simulated_step(
    item: TrainingGraph,
    given: Config | Plan,
    cluster: ConfigLike | Cluster | Network | None = None,
    *,
    batch: int | None = None,
    machine: Machine | None = None,
) -> SimulatedStep:
    """Predict one step as `simulate` does, and return it with its analysis."""
    from autograph_rewrite.cost.simulate import simulate as run

    if isinstance(given, Plan):
        return run(item, given, cluster, batch=batch, machine=machine)
    flat = normalise_original(item)
    return run(flat, requested(flat, given, batch), given if cluster is None else cluster, batch=batch, machine=machine)


def requested(item: TrainingGraph, given: Config | Plan, batch: int | None = None) -> Plan:
    """Return a given plan, or the request that a configuration's builder makes, even if it cannot be carried out.

    Raises:
        ConfigError: the configuration does not fit the item.
    """
    from autograph_rewrite.strategies import named_builder

    if isinstance(given, Plan):
        return given
    config = given.with_devices(())
    return named_builder(config, batch).build(item, config)


def report(
    target: Any,
    out: str | Path = "report.html",
    config: ConfigLike | Plan | None = None,
    *,
    batch: int | None = None,
    task: int | None = None,
    measured: Profile | str | Path | None = None,
    verify: bool = False,
    title: str = "",
    specs: Sequence[Any] = (),
) -> Path:
    """Write one offline HTML file that shows a graph after each pass, and the cost of a step.

    Args:
        target: as for `verify`; or a rewritten item.
        out: the file.
        config: the configuration or plan to rewrite a training graph by; without it, only the graph itself is shown.
        batch: examples of all devices together, where the graph leaves that open.
        task: the process of the job whose graph is shown; default: all of them.
        measured: the result of `profile`, or the file in which it was saved.
        verify: train some steps of the graph and of its rewrite, and report in the page whether they agree.
        title: of the page; default: the name of the file.
        specs: as for `verify`.

    Returns:
        The path of the file.

    Raises:
        RewriteError: the graph cannot be rewritten so, or already has been, or there is nothing to verify; then no file
            is written.
    """
    from autograph_rewrite.inspect.pass_states import GraphStates
    from autograph_rewrite.inspect.profile import Profile
    from autograph_rewrite.inspect.report import Reported, is_rewritten, of_ranks, report_page
    from autograph_rewrite.inspect.report_view import plan_of

    original, new = _traces(target, specs)[0]
    given = chosen(config) if config is not None else None
    plan = plan_of(new, given if isinstance(given, Plan) else None)
    found = Profile.load(measured) if isinstance(measured, (str, Path)) else measured
    states = GraphStates()
    if verify and (original is new and given is None):
        hint = "give the original graph with the configuration"
        raise GraphError("there is nothing to verify: no rewrite of this graph is at hand", hint=hint)
    if original is new and (new.report is not None or is_rewritten(new.graph)):
        if isinstance(given, Config):
            hint = "give the original with the configuration; or this one alone, or with its plan"
            raise GraphError("this graph is distributed already", hint=hint)
        states.keep("graph", new.graph, new.placements)
        shown = Reported(states, None, new, plan, batch=batch, measured=found)
    elif original is new and given is None:
        states.keep("graph", original.graph, original.placements)
        shown = Reported(states, original, measured=found)
    else:
        asked = given or plan or chosen(None)

        def ranked(flat: TrainingGraph, observers: list[Observer], task: int) -> TrainingGraph:
            return rewrite(flat, asked, observers=observers, batch=batch, task=task)

        new = of_ranks(states, original, ranked, task)
        network = given if isinstance(given, Config) else None
        checked = _verified(original, asked, batch) if verify else None
        shown = Reported(states, original, new, new.report.plan, network, batch, found, checked)
    stage("drawing")
    write_whole(out, report_page(title or Path(out).stem, shown).encode())
    return ShownFile(out)


def _verified(original: TrainingGraph, given: Config | Plan, batch: int | None) -> dict[str, Any]:
    """Return the report of `verify` as data, with its text."""
    stage("verifying the rewrite")
    found = verify(original, given, batch=batch)
    return {**found.data(), "text": str(found)}


def _compared(item: Any, config: ConfigLike | Plan | None, specs: Sequence[Any]) -> tuple[TrainingGraph, Config | Plan]:
    """Return an original, and the configuration or plan by which it is rewritten."""
    trace = _traces(item, specs)[0]
    has_run = trace.original is not trace.rewritten
    return trace.original, trace.rewritten.report.plan if config is None and has_run else chosen(config)


def _traces(target: Any, specs: Sequence[Any] = ()) -> Sequence[RewrittenTrace]:
    """Return the traces of a result of `distribute`; of an item or a target of `distribute`, the original as both."""
    if not isinstance(target, TrainingGraph):
        from autograph_rewrite.load.keras_library import is_model
        from autograph_rewrite.runtime.distribute import traces_of

        if not specs:
            return traces_of(target)
        target = (GraphItem.from_keras if is_model(target) else GraphItem.from_function)(target, *specs)
    elif specs:
        raise GraphError("an item needs no specs: it is traced already", hint="leave `specs` out")
    return [RewrittenTrace(target, target)]
