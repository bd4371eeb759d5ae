"""Session mode with parameter servers: programs that do more with a graph than one fetch per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.runtime.job.digests import session_name
from tests.jobs.programs.job import Case, Job, Results
from tests.jobs.programs.served_graphs import (
    WIDTH,
    Names,
    accumulated,
    adam,
    averaged,
    by_reference,
    by_the_program,
    checked,
    clipped,
    counted,
    drawn,
    fetched_after,
    in_a_branch,
    kept_in_a_branch,
    looked_up,
    looped,
    low_precision,
    momentum,
    normalised,
    summed,
    two_players,
    with_words,
)
from tests.support.training import control_flow, v1

Program = Callable[["Opened"], None]


class Opened:
    """A session on one process's part of the data, and all that has been fetched in it.

    Args:
        job: this process.
        item: the original or rewritten one.
        session: of the item.
    """

    def __init__(self, job: Job, item: GraphItem, session: Any) -> None:
        self.job, self.item, self.session = job, item, session
        self.results: Results = {}
        self._count = 0

    def run(self, *fetches: str, size: int = 0, **feeds: Any) -> None:
        """Run fetches; `size` is the number of examples of all workers."""
        self._count += 1
        if size:
            rng = np.random.default_rng(self._count)
            feeds["x"] = self.job.part(rng.normal(size=(size, WIDTH)))
        for name, value in zip(fetches, self.session.run(list(fetches), feeds), strict=True):
            if value is not None:
                self.results[f"{name} of run {self._count}"] = np.asarray(value)

    def look(self) -> None:
        """Note what all variables hold."""
        self._count += 1
        for name in self.item.variables:
            self.results[f"variable {name} after {self._count}"] = np.asarray(self.session.read_variable(name))


def case(
    build: Callable[[], Names],
    program: Program,
    version: int = 2,
    name: str = "",
    **config: Any,
) -> Case:
    """Return the case of a graph; `build` makes it, and returns the names of its train ops and outputs."""

    def run(job: Job) -> Results:
        item = item_of(build, version)
        more = {**config, "strategy": {**job.config()["strategy"], "name": name}} if name else config
        new = ar.rewrite(item, job.config(**more)) if job.is_rewritten else item
        with new.session() as session:
            opened = Opened(job, item, session)
            program(opened)
            opened.look()
        return opened.results

    return run


def item_of(build: Callable[[], Names], version: int = 2) -> GraphItem:
    """Return the item of a graph."""
    graph = tf.Graph()
    with graph.as_default(), control_flow(version):
        v1.set_random_seed(1)
        targets, outputs = build()
        tf.group(v1.global_variables_initializer(), v1.tables_initializer(), name="begin")
    return GraphItem.from_graph(
        graph, train_op=list(targets), outputs=list(outputs), init_op="begin", batch_inputs={"x": 0}
    )


def train(opened: Opened, *fetches: str, sizes: Sequence[int] = (8, 7, 1, 5)) -> None:
    """Initialise and train."""
    opened.run("begin")
    for size in sizes:
        opened.run(*(fetches or (*opened.item.outputs, *opened.item.targets)), size=size)


def play(opened: Opened) -> None:
    """Run the two train ops by themselves, in turn, and together."""
    opened.run("begin")
    opened.run("one", "score", size=8)
    opened.run("two", size=6)
    opened.run("two", size=5)
    opened.run("one", "two", "score", size=7)
    opened.run("score", size=3)
    opened.run("one", size=1)


def looks_between(opened: Opened) -> None:
    """Fetch the loss without training, in between, and the fetches in another order on each worker."""
    opened.run("begin")
    opened.run("loss", size=5)
    for size in (8, 7):
        names = ["train", "loss", "norm"]
        opened.run(*(names if opened.job.task else names[::-1]), size=size)
        opened.run("norm", size=3)
        opened.run("train", size=size)
        opened.look()


def initialised_one_by_one(opened: Opened) -> None:
    """Initialise variable by variable; then write one in the running job, everywhere."""
    for var in opened.item.variables.values():
        opened.run(var.initializer)
    train_on(opened)
    opened.session.write_variable("w", np.full((WIDTH, 3), 0.25))
    train_on(opened)
    opened.run("begin")
    train_on(opened)


def train_on(opened: Opened) -> None:
    for size in (8, 3):
        opened.run(*opened.item.outputs, *opened.item.targets, size=size)


def two_sessions(job: Job) -> Results:
    """Train in two sessions on one graph, and in one on another, by turns: nobody sees the others' variables."""
    results: Results = {}
    item, other = item_of(clipped), item_of(averaged)
    if job.is_rewritten:
        item, other = ar.rewrite(item, job.config()), ar.rewrite(other, job.config())
    with item.session() as one, item.session() as two, other.session() as three:
        several = [Opened(job, each.item, each) for each in (one, two, three)]
        for opened in several:
            opened.run("begin")
        for at in (0, 1, 0, 2, 1, 2, 0):
            several[at].run("loss", "train", size=4 + at)
        for at, opened in enumerate(several):
            opened.look()
            results |= {
                f"{name} in session {at}".replace("variable", "variable of"): v for name, v in opened.results.items()
            }
    return {name.replace("variable of", "variable"): value for name, value in results.items()}


def leave(session: Any) -> None:
    """Push a contribution to each gradient, as a worker does whose step fails later on."""
    raw = tf.raw_ops
    with session.graph.as_default():
        sums = [op for op in session.graph.get_operations() if op.type == "ResourceConditionalAccumulator"]
        handles = [op.outputs[0] for op in sums if "MatMul" in op.name]
        pushes = []
        for handle in handles:
            with session.graph.device(handle.device):
                pushes.append(
                    raw.ResourceAccumulatorApplyGradient(
                        handle=handle, local_step=np.int64(2**62), gradient=np.full((WIDTH, 3), 7.0)
                    )
                )
    assert pushes
    session.tf_session.run(pushes)


def goes_on(opened: Opened) -> None:
    """Fail in one step, on some or all workers, and carry on; one of them had pushed a gradient by then."""
    opened.run("begin")
    opened.run("loss", "train", size=6)
    for failing in ({0, 1}, {1}, {0}):
        fails = opened.job.task in failing or not opened.job.is_rewritten
        raised = ""
        try:
            opened.session.run(["train"], {"x": np.full((2, WIDTH), 99.0 if fails else 1.0)})
        except tf.errors.InvalidArgumentError as error:
            raised = error.message
        assert "assertion failed" in raised, raised
        opened.look()
        if opened.job.task == 1 and opened.job.is_rewritten:
            leave(opened.session)
        opened.run("loss", "train", size=5)


def by_themselves(staleness: int | None) -> Case:
    """Return the case of workers that do not wait for each other, or only for who is some steps behind.

    The gradients do not depend on the weights, so whatever the order of the updates, all have to be in the sum.
    """
    steps = 12
    how = {"sync": False} if staleness is None else {"staleness": staleness}

    def run(job: Job) -> Results:
        item = item_of(summed)
        requests = [{"match": "w", "synchronizer": "ps", **how}]
        new = ar.rewrite(item, job.config(variables=requests)) if job.is_rewritten else item
        ahead = 0
        with new.session() as session:
            session.run("begin")
            for at in range(steps):
                x = np.random.default_rng(at).normal(size=(4, WIDTH))
                session.run("train", {"x": job.part(x)})
                if job.is_rewritten and staleness is not None:
                    clock = session._coordinator.clock
                    ahead = max(ahead, at + 1 - int(clock._run(clock._read).min()))
                time.sleep(0.01 * job.task)
            if job.is_rewritten:
                assert ahead <= (staleness or 0), "who is ahead has to wait"
                session_name(new.report.member, 30)  # all have ended
            return {"variable w": np.asarray(session.read_variable("w"))}

    return run


PROXIES: Mapping[str, Any] = {"variables": [{"match": ".*", "synchronizer": "ps", "proxy": True}]}
PARALLAX = "Parallax"


CASES: dict[str, Case] = {
    "clipped": case(clipped, looks_between),
    "clipped_parallax": case(clipped, looks_between, name=PARALLAX),
    "clipped_proxies": case(clipped, looks_between, **PROXIES),
    "clipped_one_by_one": case(clipped, initialised_one_by_one),
    "clipped_one_by_one_proxies": case(clipped, initialised_one_by_one, **PROXIES),
    "averaged": case(averaged, train),
    "averaged_proxies": case(averaged, train, **PROXIES),
    "fetched_after": case(fetched_after, train),
    "fetched_after_proxies": case(fetched_after, train, **PROXIES),
    "two_players": case(two_players, play),
    "two_players_v1": case(two_players, play, version=1),
    "accumulated": case(accumulated, train),
    "accumulated_v1": case(accumulated, train, version=1),
    "counted": case(counted, train),
    "looked_up_adam": case(looked_up(adam), train),
    "looked_up_momentum": case(looked_up(momentum), train, name=PARALLAX),
    "with_words": case(with_words, train),
    "by_reference": case(by_reference, train),
    "by_the_program": case(by_the_program, train),
    "in_a_branch": case(in_a_branch, train, **PROXIES),
    "in_a_branch_v1": case(in_a_branch, train, version=1, **PROXIES),
    "in_a_branch_v1_there": case(in_a_branch, train, version=1),
    "kept_in_a_branch": case(kept_in_a_branch, train),
    "low_precision": case(low_precision, train),
    "normalised": case(normalised, train),
    "drawn": case(drawn, train),
    "looped": case(looped, train),
    "looped_v1": case(looped, train, version=1),
    "checked": case(checked, goes_on),
    "two_sessions": two_sessions,
    "asynchronous": by_themselves(None),
    "stale": by_themselves(2),
}
