"""A table of which a step touches one row in a hundred: rewritten, and in TensorFlow's two strategies for such jobs.

    all-reduce             ar.distribute; every worker has the table
    all-reduce, session    the same as a graph in a session
    parallax               a graph in a session; a server has the table
    parallax, no server    the same; worker 0 has the table
    mirrored               tf.distribute.MultiWorkerMirroredStrategy in a custom training loop
    servers                tf.distribute.ParameterServerStrategy: each worker does its part, then all are joined
    auto                   what Auto makes of a job with a server, in a session
    auto, no server        the same without one

Every job has so many workers; those with a server have one more process, and TensorFlow's coordinator is another one.
All start from the same weights and are given the same batch. A core has every second process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.child import call
from benchmarks.dist import environments, free_addresses, pin
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import ratio
from benchmarks.turns import Crew, times

TITLE = "a large embedding over two and three workers, beside two strategies of TensorFlow, pinned to a core each"
OURS = {
    "all-reduce": ("AllReduce", 0),
    "all-reduce, session": ("AllReduce", 0),
    "parallax": ("Parallax", 1),
    "parallax, no server": ("Parallax", 0),
    "auto": ("Auto", 1),
    "auto, no server": ("Auto", 0),
}
"""Strategy, and number of servers."""
RIVALS = tuple(how for how, (name, _) in OURS.items() if name != "Auto")
PEERS = ("mirrored", "servers")
CHOICES = {
    0: {"AllReduce": "all-reduce, session", "Parallax": "parallax, no server", "Auto": "auto, no server"},
    1: {"AllReduce": "all-reduce, session", "Parallax": "parallax", "Auto": "auto"},
}
"""Contestants in sessions, by the number of servers and the strategy. A plan of Auto's own is measured beside both; one
that is a builder's is that builder's contestant, as two runs of one plan differ by a tenth."""
TARGETS = {"mirrored": 0.8, "servers": 0.6}


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    figures, details = [], {}
    for workers in effort.some((2, 3)):
        made = call("benchmarks.dist_embedding:plans", {"tiny": effort.tiny, "workers": workers}, timeout=300)
        seconds = steps((*RIVALS, *PEERS), workers, effort)
        choices = {
            str(servers): seconds
            if made[f"Auto, {servers} servers"]["is"]
            else steps([*names.values()], workers, effort)
            for servers, names in CHOICES.items()
        }
        found = details[str(workers)] = {"seconds": seconds, "choices": choices, "plans": made}
        figures += _figures(workers, **found)
    return figures, details


def steps(contestants: Sequence[str], workers: int, effort: Effort) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant, one number per round."""
    with ExitStack() as stack:
        crews = {}
        for how in contestants:
            crews[how] = stack.enter_context(crew(how, workers, effort.tiny))
            crews[how].ready()
        return times(crews, rounds=effort.rounds(15), calls=2 if effort.tiny else 10)


def crew(how: str, workers: int, tiny: bool) -> Crew:
    """Start the processes of a contestant: its workers first, then a server, then a coordinator."""
    counts = {"worker": workers}
    if how == "servers":
        counts |= {"ps": 1, "chief": 1}
    elif how in OURS and OURS[how][1]:
        counts |= {"ps": OURS[how][1]}
    tasks = [(job, index) for job, count in counts.items() for index in range(count)]
    free = iter(free_addresses(len(tasks)))
    told = environments({job: [next(free) for _ in range(count)] for job, count in counts.items()})
    given = [
        {"how": how, "job": job, "worker": index, "workers": workers, "tiny": tiny, "core": core}
        for core, (job, index) in enumerate(tasks)
    ]
    return Crew("benchmarks.dist_embedding:step", given, told)


def step(how: str, job: str, worker: int, workers: int, tiny: bool, core: int) -> Callable[[], Any]:
    """Return the training step of one process (in it)."""
    pin(core)
    from benchmarks import embedding

    size = embedding.size(tiny)
    if how == "servers":
        return _of_coordinator(size, workers) if job == "chief" else _serves(workers)
    if how == "mirrored":
        return _in_strategy(size, embedding.batch(size, worker, workers))
    config = _config(how)
    if job == "ps":
        import autograph_rewrite as ar

        return _in_background(lambda: ar.distribute(abs, config))
    make = _in_function if how == "all-reduce" else _in_session
    return make(config, size, embedding.batch(size, worker, workers))


def _config(how: str) -> dict[str, Any]:
    return {"devices": ["CPU:0"], "strategy": {"name": OURS[how][0]}}


def _in_background(serve: Callable[[], object]) -> Callable[[], None]:
    """Serve in a thread, so that this process answers whoever counts the steps."""
    threading.Thread(target=serve, daemon=True).start()
    return lambda: None


def _in_function(config: Mapping[str, Any], size: Any, data: tuple[Any, Any]) -> Callable[[], Any]:
    import tensorflow as tf

    import autograph_rewrite as ar  # first, so that it joins the job
    from benchmarks import embedding

    weights = embedding.variables(size)
    optimizer = tf.compat.v1.train.AdagradOptimizer(embedding.RATE, embedding.START)
    distributed = ar.distribute(lambda ids, labels: embedding.train(weights, optimizer, (ids, labels), size), config)
    ids, labels = map(tf.constant, data)
    return lambda: distributed(ids, labels)


def _in_session(config: Mapping[str, Any], size: Any, data: tuple[Any, Any]) -> Callable[[], Any]:
    import autograph_rewrite as ar
    from benchmarks import embedding

    item = embedding.item(size)
    session = ar.rewrite(item, config).session()
    session.run("init")
    feeds = {"ids": data[0], "labels": data[1]}
    return lambda: session.run(["loss", "train"], feeds)


def _in_strategy(size: Any, data: tuple[Any, Any]) -> Callable[[], Any]:
    """Follow TensorFlow's guide to custom training loops; every worker has its part of the batch ready."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    from benchmarks import embedding

    with strategy.scope():
        weights = embedding.variables(size)
        optimizer = tf.compat.v1.train.AdagradOptimizer(embedding.RATE, embedding.START)
    data = tuple(map(tf.constant, data))

    @tf.function
    def train(ids: Any, labels: Any) -> Any:
        losses = strategy.run(lambda *part: embedding.train(weights, optimizer, part, size), (ids, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return lambda: train(*data)


def _serves(workers: int) -> Callable[[], None]:
    """Be a worker or a server of TensorFlow's coordinator, who tells it what to do."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster, job, task = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    # The guide: with fewer threads than this, which one core would have, a step never ends.
    threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=workers + 1)
    server = tf.distribute.Server(cluster, job_name=job, task_index=task, protocol="grpc", config=threads)
    return _in_background(server.join)


def _of_coordinator(size: Any, workers: int) -> Callable[[], Any]:
    """Follow TensorFlow's guide to parameter servers; a step of the job is one of each worker on its part."""
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    from benchmarks import embedding

    with strategy.scope():
        weights = embedding.variables(size)
        state = [tf.Variable(tf.fill(weight.shape, embedding.START)) for weight in weights]

    def parts(context: Any) -> Any:
        part = embedding.batch(size, context.input_pipeline_id, workers)
        return tf.data.Dataset.from_tensors(part).repeat()

    @tf.function
    def train(batches: Any) -> Any:
        return strategy.run(lambda *part: _updated(weights, state, part, size), next(batches))

    batches = iter(coordinator.create_per_worker_dataset(strategy.distribute_datasets_from_function(parts)))

    def step() -> None:
        for _ in range(workers):
            coordinator.schedule(train, (batches,))
        coordinator.join()

    return step


def _updated(weights: Sequence[Any], state: Sequence[Any], part: tuple[Any, Any], size: Any) -> Any:
    """Do what the optimizer of the others does: on a server, it cannot make its state while a step is traced."""
    import tensorflow as tf

    from benchmarks import embedding

    with tf.GradientTape() as tape:
        total = embedding.loss(weights, *part, size)
    for weight, kept, gradient in zip(weights, state, tape.gradient(total, weights), strict=True):
        both: dict[str, Any] = {"var": weight.handle, "accum": kept.handle, "lr": embedding.RATE}
        both |= {"epsilon": 0.0, "use_locking": True}
        if not isinstance(gradient, tf.IndexedSlices):
            tf.raw_ops.ResourceApplyAdagradV2(**both, grad=gradient)
            continue
        rows, which = tf.unique(gradient.indices)
        added = tf.math.unsorted_segment_sum(gradient.values, which, tf.size(rows))
        tf.raw_ops.ResourceSparseApplyAdagradV2(**both, grad=added, indices=rows)
    return total


def plans(tiny: bool, workers: int) -> dict[str, Any]:
    """Return what the cost model says of our contestants, and what Auto chooses, without servers and with one."""
    import autograph_rewrite as ar
    from benchmarks import embedding

    size = embedding.size(tiny)
    item = embedding.item(size)
    found: dict[str, Any] = {}
    for servers, names in CHOICES.items():
        cluster = {"workers": [f"host-{i}:1" for i in range(workers)], "ps": ["host-ps:1"] * servers}
        made: dict[str, Any] = {}
        for name in names:
            config = ar.Config.of({"devices": ["CPU:0"], "cluster": cluster, "strategy": {"name": name}})
            plan = ar.build_plan(item, config)
            step = ar.simulate(item, plan, config, batch=size.examples)
            tables = [one for one in plan.variables if one.name == "table"]
            found[f"{name}, {servers} servers"] = {
                "predicted": step.step_seconds,
                "bytes": sum(link.count * link.bytes for link in step.links) // 2,
                "table": f"{tables[0].options.synchronizer} {len(tables[0].servers) or workers}",
                "copies": 1 if tables[0].servers else workers,
                "notes": list(plan.notes),
            }
            made[name] = plan
        alike = (name for name, plan in made.items() if name != "Auto" and plan.variables == made["Auto"].variables)
        found[f"Auto, {servers} servers"]["is"] = next(alike, "")
    return found


def _figures(
    workers: int,
    seconds: Mapping[str, Sequence[float]],
    choices: Mapping[str, Mapping[str, Sequence[float]]],
    plans: Mapping[str, Any],
) -> list[Figure]:
    better = min(RIVALS, key=lambda how: median(seconds[how]))
    shown = ", ".join(f"{how} {milliseconds(median(found))}" for how, found in seconds.items())
    figures = [
        Figure(
            f"{workers} workers: the better of all-reduce and parallax / {peer}",
            ratio(seconds[better], seconds[peer]),
            at_most=target,
            how=f"{better}; {shown}",
        )
        for peer, target in TARGETS.items()
    ]
    figures += [_choice(workers, servers, choices[str(servers)], plans) for servers in CHOICES]
    held = plans["Parallax, 1 servers"]["copies"]
    figures.append(Figure(f"{workers} workers: copies of the table under Parallax", held, "", at_most=1.0))
    return figures


def _choice(workers: int, servers: int, seconds: Mapping[str, Sequence[float]], plans: Mapping[str, Any]) -> Figure:
    """Return how good Auto's choice was, by what was measured, and why it chose so."""
    names = CHOICES[servers]
    ours = {name: plans[f"{name}, {servers} servers"] for name in names}
    chosen = names[ours["Auto"]["is"] or "Auto"]
    least = min((names["AllReduce"], names["Parallax"]), key=lambda how: median(seconds[how]))
    measured = ", ".join(f"{how} {milliseconds(median(seconds[how]))}" for how in names.values() if how in seconds)
    predicted = ", ".join(f"{name} {milliseconds(one['predicted'])}" for name, one in ours.items())
    moved = ", ".join(f"{name} {one['bytes'] / 1e6:.3g} MB" for name, one in ours.items())
    copies = ", ".join(f"{name} {one['copies']}" for name, one in ours.items())
    table = ours["Auto"]["table"]
    how = f"{measured}; table: {table}; predicted: {predicted}; over links in a step: {moved}; copies: {copies}"
    name = f"{workers} workers, {servers} servers: what Auto chose / the faster of both in a session"
    return Figure(name, ratio(seconds[chosen], seconds[least]), at_most=1.0, how=how)
