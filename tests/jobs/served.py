"""Session mode with parameter servers: programs that do more with a graph than one fetch per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.runtime.agreement import common_name
from tests.jobs.job import Case, Job, Results
from tests.training import control_flow, placeholder, v1, variable

WIDTH = 4
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
    build: Callable[[], tuple[Sequence[str], Sequence[str]]],
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


def item_of(build: Callable[[], tuple[Sequence[str], Sequence[str]]], version: int = 2) -> GraphItem:
    """Return the item of a graph."""
    graph = tf.Graph()
    with graph.as_default(), control_flow(version):
        v1.set_random_seed(1)
        targets, outputs = build()
        tf.group(v1.global_variables_initializer(), v1.tables_initializer(), name="begin")
    return GraphItem.from_graph(
        graph, train_op=list(targets), outputs=list(outputs), init_op="begin", batch_inputs={"x": 0}
    )


def predicted(units: int = 3) -> Any:
    """Return a prediction from the input `x` and a trained `w`."""
    w = variable("w", np.linspace(-1, 1, WIDTH * units).reshape(WIDTH, units))
    return placeholder("x", None, WIDTH) @ w


def named(**tensors: Any) -> list[str]:
    """Name tensors; return the names."""
    return [tf.identity(tensor, name=name).op.name for name, tensor in tensors.items()]


def train(opened: Opened, *fetches: str, sizes: Sequence[int] = (8, 7, 1, 5)) -> None:
    """Initialise and train."""
    opened.run("begin")
    for size in sizes:
        opened.run(*(fetches or (*opened.item.outputs, *opened.item.targets)), size=size)


def clipped() -> tuple[Sequence[str], Sequence[str]]:
    """Clip by the norm of all gradients, which is fetched as well, with a rate that decays."""
    y = predicted() + variable("b", np.zeros(3))
    loss = tf.reduce_mean(tf.square(y - 1))
    step = v1.train.get_or_create_global_step()
    optimizer = v1.train.AdamOptimizer(v1.train.exponential_decay(0.1, step, 2, 0.5))
    gradients, trained = zip(*optimizer.compute_gradients(loss), strict=True)
    clipped, norm = tf.clip_by_global_norm(gradients, 0.3)
    optimizer.apply_gradients(zip(clipped, trained, strict=True), step, name="train")
    return ["train"], named(loss=loss, norm=norm)


def averaged() -> tuple[Sequence[str], Sequence[str]]:
    """Keep a moving average of the weights, updated behind the train op."""
    loss = tf.reduce_mean(tf.square(predicted() - 1))
    step = v1.train.get_or_create_global_step()
    descent = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step)
    average = v1.train.ExponentialMovingAverage(0.9, step)
    with tf.control_dependencies([descent]):
        tf.group(average.apply(v1.trainable_variables()), name="train")
    return ["train"], named(loss=loss)


def fetched_after() -> tuple[Sequence[str], Sequence[str]]:
    """Fetch what holds only once the update is done: the weights, their norm, and a prediction."""
    y = predicted()
    loss = tf.reduce_mean(tf.square(y - 1))
    w = v1.trainable_variables()[0]
    descent = v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    with tf.control_dependencies([descent]):
        new = w.read_value()
        outputs = named(loss=loss, new=new, norm=tf.norm(new), rows=tf.reduce_sum(new, 1))
    return ["train"], outputs


def two_players() -> tuple[Sequence[str], Sequence[str]]:
    """Train two halves against each other, each by an op of its own."""
    y = predicted()
    critic = variable("critic", np.linspace(0.5, -0.5, 3).reshape(3, 1))
    score = tf.reduce_mean(tf.sigmoid(y @ critic))
    one, two = v1.trainable_variables()
    adam = v1.train.AdamOptimizer
    adam(0.1).minimize(score, var_list=[one], name="one")
    adam(0.05).minimize(-score, var_list=[two], name="two")
    return ["one", "two"], named(score=score)


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


def accumulated() -> tuple[Sequence[str], Sequence[str]]:
    """Add up the gradients of two steps and apply them in a branch."""
    loss = tf.reduce_mean(tf.square(predicted() - 1))
    w = v1.trainable_variables()[0]
    held = v1.get_variable("held", initializer=np.zeros((WIDTH, 3)), use_resource=True, trainable=False)
    count = v1.get_variable("count", initializer=np.int64(0), use_resource=True, trainable=False)
    (slope,) = v1.gradients(loss, [w])
    optimizer = v1.train.AdamOptimizer(0.1)
    with tf.control_dependencies([held.assign_add(slope), count.assign_add(1)]):

        def apply() -> Any:
            with tf.control_dependencies([optimizer.apply_gradients([(held.read_value() / 2, w)])]):
                return tf.identity(held.assign(tf.zeros_like(held)))

        v1.cond(tf.equal(count.read_value() % 2, 0), apply, lambda: held.read_value(), name="branch")
        done = v1.get_default_graph().get_operations()[-1]
    tf.group(done, name="train")
    return ["train"], named(loss=loss)


def counted() -> tuple[Sequence[str], Sequence[str]]:
    """Count and keep statistics in variables that no optimizer knows; some are written twice."""
    y = predicted()
    loss = tf.reduce_mean(tf.square(y - 1))
    make = lambda name, value: v1.get_variable(name, initializer=value, use_resource=True, trainable=False)  # noqa: E731
    seen, largest, flags = make("seen", np.int32(0)), make("largest", 0.0), make("flags", np.zeros(3, bool))
    mean = make("mean", np.zeros(3))
    updates = [
        seen.assign_add(tf.shape(y)[0]),
        largest.assign(tf.maximum(largest, tf.cast(tf.reduce_max(tf.concat([y, [[-9.0] * 3]], 0)), tf.float32))),
        flags.assign(tf.logical_or(flags, tf.reduce_any(y > 1, 0))),
        mean.assign_sub(0.1 * (mean - tf.reduce_sum(y, 0))),
    ]
    descent = v1.train.RMSPropOptimizer(0.05).minimize(loss)
    tf.group(descent, *updates, name="train")
    return ["train"], named(loss=loss)


def looked_up(optimizer: Callable[[], Any]) -> Callable[[], tuple[Sequence[str], Sequence[str]]]:
    """Look rows up twice in one table, and use it once whole: tied."""

    def build() -> tuple[Sequence[str], Sequence[str]]:
        x = placeholder("x", None, WIDTH)
        rows = v1.get_variable("rows", initializer=np.linspace(-1, 1, 21).reshape(7, 3), use_resource=True)
        other = v1.get_variable("other", initializer=np.linspace(1, -1, 21).reshape(7, 3), use_resource=True)
        ids = tf.cast(tf.math.floormod(tf.cast(tf.round(3 * x), tf.int32), 7), tf.int64)
        y = tf.gather(rows, ids[:, :2]) + tf.gather(other, ids[:, 2:]) * tf.gather(rows, ids[:, 1:3])
        loss = tf.reduce_sum(tf.square(y - 1)) / 30.0
        optimizer().minimize(loss, name="train")
        return ["train"], named(loss=loss)

    return build


def with_words() -> tuple[Sequence[str], Sequence[str]]:
    """Use a table of strings, and write a summary."""
    y = predicted()
    content = v1.lookup.KeyValueTensorInitializer(["low", "high"], np.array([0.5, 2.0]))
    table = v1.lookup.StaticHashTable(content, default_value=1.0)
    weight = tf.stop_gradient(tf.reshape(table.lookup(tf.where(y[:, 0] > 0, "high", "low")), [-1, 1]))
    loss = tf.reduce_mean(tf.square(y - 1) * weight)
    v1.train.AdagradOptimizer(0.1).minimize(loss, name="train")
    v1.summary.scalar("loss_of_step", tf.cast(loss, tf.float32))
    summary = v1.summary.merge_all()
    return ["train"], [*named(loss=loss, words=tf.where(y > 0, "high", "low")), summary.op.name]


def by_reference() -> tuple[Sequence[str], Sequence[str]]:
    """Use the variables of TensorFlow 1."""
    x = placeholder("x", None, WIDTH)
    w = v1.get_variable("w", initializer=np.linspace(-1, 1, 12).reshape(WIDTH, 3), use_resource=False)
    step = v1.get_variable("step", initializer=np.int64(0), use_resource=False, trainable=False)
    loss = tf.reduce_mean(tf.square(x @ w - 1))
    v1.train.AdamOptimizer(0.1).minimize(loss, global_step=step, name="train")
    return ["train"], named(loss=loss)


def low_precision() -> tuple[Sequence[str], Sequence[str]]:
    """Compute in bfloat16 and float16, with numbers that both hold exactly: gradients are cast on their way."""
    x = tf.cast(tf.round(placeholder("x", None, WIDTH)), tf.bfloat16)
    w = v1.get_variable("w", initializer=np.ones((WIDTH, 3), np.float32), use_resource=True)
    h = v1.get_variable("h", initializer=np.ones(3, np.float16), use_resource=True)
    y = tf.cast(x @ tf.cast(w, tf.bfloat16), tf.float32)
    loss = tf.reduce_sum(y) + tf.cast(tf.reduce_sum(tf.cast(tf.shape(x)[0], tf.float16) * h), tf.float32)
    v1.train.GradientDescentOptimizer(0.125).minimize(loss, name="train")
    return ["train"], named(examples=tf.shape(x)[0])


def normalised() -> tuple[Sequence[str], Sequence[str]]:
    """Normalise over the batch, with moving averages that follow the update."""
    y = predicted()
    mean, variance = tf.nn.moments(y, [0])
    make = lambda name, value: v1.get_variable(name, initializer=value, use_resource=True, trainable=False)  # noqa: E731
    moving = [make("mean", np.zeros(3)), make("variance", np.ones(3))]
    scale = variable("scale", np.linspace(0.5, 1.5, 3))
    z = (y - mean) / tf.sqrt(variance + 1e-3) * scale
    loss = tf.reduce_mean(tf.square(z - 1)) + tf.reduce_mean(tf.abs(y))
    updates = [m.assign_sub(0.1 * (m - v)) for m, v in zip(moving, (mean, variance), strict=True)]
    with tf.control_dependencies(updates):
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
    return ["train"], named(loss=loss)


def drawn() -> tuple[Sequence[str], Sequence[str]]:
    """Drop out with seeds."""
    y = tf.nn.dropout(predicted(8), 0.4, seed=3)
    loss = tf.reduce_mean(tf.square(y - 1))
    v1.train.FtrlOptimizer(0.1).minimize(loss, name="train")
    return ["train"], named(loss=loss, y=y)


def looped() -> tuple[Sequence[str], Sequence[str]]:
    """Read a variable in a loop, and another one in a branch."""
    x = placeholder("x", None, WIDTH)
    w = variable("w", 0.3 * np.eye(WIDTH))
    b = variable("b", np.linspace(0, 1, WIDTH))
    state = tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, tf.tanh(s @ w)), [tf.constant(0), x])[1]
    step = v1.train.get_or_create_global_step()
    state = v1.cond(tf.equal(step % 2, 0), lambda: state + b, lambda: state * b * 2)
    loss = tf.reduce_sum(tf.square(state)) / 10.0
    v1.train.AdamOptimizer(0.05).minimize(loss, step, name="train")
    return ["train"], named(loss=loss)


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


def checked() -> tuple[Sequence[str], Sequence[str]]:
    """Refuse large inputs, in one of two gradients that are clipped together."""
    x = placeholder("x", None, WIDTH)
    w, v = (
        variable("w", np.linspace(-1, 1, 12).reshape(WIDTH, 3)),
        variable("v", np.linspace(1, -1, 12).reshape(WIDTH, 3)),
    )
    with tf.control_dependencies([v1.assert_less(tf.reduce_max(tf.abs(x)), np.float64(50.0))]):
        y = tf.identity(x) @ w
    losses = [tf.reduce_sum(tf.square(y - 1)), tf.reduce_sum(tf.square(x @ v - 1))]
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    slopes = tf.clip_by_global_norm([tf.gradients(loss, [u])[0] for loss, u in zip(losses, (w, v), strict=True)], 1.0)[
        0
    ]
    optimizer.apply_gradients(zip(slopes, (w, v), strict=True), name="train")
    return ["train"], named(loss=losses[0])


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
    """Fail in one step, on all workers, and carry on; one of them had pushed a gradient by then."""
    opened.run("begin")
    opened.run("loss", "train", size=6)
    for _ in range(2):
        try:
            opened.session.run(["train"], {"x": np.full((2, WIDTH), 99.0)})
        except tf.errors.InvalidArgumentError:
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
                    clock = session._clock
                    ahead = max(ahead, at + 1 - int(clock._session.run(clock._read).min()))
                time.sleep(0.01 * job.task)
            if job.is_rewritten:
                assert ahead <= (staleness or 0), "who is ahead has to wait"
                common_name(new.report.member, 30)  # all have ended
            return {"variable w": np.asarray(session.read_variable("w"))}

    return run


def summed() -> tuple[Sequence[str], Sequence[str]]:
    """Add up what the examples hold."""
    loss = tf.reduce_sum(predicted())
    v1.train.GradientDescentOptimizer(1.0).minimize(loss, name="train")
    return ["train"], named(loss=loss)


PROXIES: Mapping[str, Any] = {"variables": [{"match": ".*", "synchronizer": "ps", "proxy": True}]}
PARALLAX = "Parallax"


def adam() -> Any:
    return v1.train.AdamOptimizer(0.1)


def momentum() -> Any:
    return v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True)


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
