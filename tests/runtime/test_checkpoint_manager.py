"""`ar.CheckpointManager`: what is saved is what was there, what is half-written is never taken, errors are said."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import autograph_rewrite as ar
from autograph_rewrite.runtime import checkpoints
from autograph_rewrite.runtime.checkpoint_targets import WHOLE_BELOW, Piece, StoredShape, deal, target_of
from autograph_rewrite.runtime.checkpoints import CheckpointFolder, JointSave, Label, read

ROWS = 40_000


class Net(tf.Module):
    """Two variables, one of them large enough to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [tf.Variable(np.arange(ROWS * 2, dtype=np.float64).reshape(ROWS, 2)), tf.Variable(3, tf.int32)]

    def set(self, value: float) -> None:
        """Give both a value."""
        for variable in self.layers:
            variable.assign(tf.fill(variable.shape, tf.cast(value, variable.dtype)))

    @property
    def values(self) -> set[float]:
        """The numbers that the variables hold."""
        return {float(number) for variable in self.layers for number in np.unique(variable.numpy())}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let parts be written once the event is set."""
    go, write = threading.Event(), checkpoints.write_part

    def late(*args: Any) -> None:
        assert go.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoints, "write_part", late)
    return go


def saved(folder: Path, *steps: int, keep: int = 9) -> Net:
    """Return a net of which there are checkpoints: of step 7, sevens."""
    net = Net()
    with ar.CheckpointManager(net, folder, max_to_keep=keep) as manager:
        for step in steps:
            net.set(step)
            manager.save(step)
    return net


def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path: Path, slow: threading.Event) -> None:
    net = Net()
    manager = ar.CheckpointManager(net, tmp_path)
    net.set(1)
    manager.save(10, {"epoch": 2})
    net.set(5)
    net.layers[0].assign_add(tf.ones_like(net.layers[0]))
    assert manager.steps == []
    slow.set()
    assert manager.restore() is not None
    assert net.values == {1.0}


def test_restore_returns_the_step_and_what_was_saved_with_it(tmp_path: Path) -> None:
    net = Net()
    manager = ar.CheckpointManager(net, tmp_path, asynchronous=False)
    assert manager.restore() is None
    manager.save(10, {"epoch": 2})
    manager.save(20, {"epoch": 3})
    found = [manager.restore(), manager.restore(10)]
    assert [(one.step, one.extra) for one in found if one is not None] == [(20, {"epoch": 3}), (10, {"epoch": 2})]
    with pytest.raises(ar.CheckpointError, match="no checkpoint of step 15"):
        manager.restore(15)


def test_a_step_that_is_saved_again_replaces_the_first_one(tmp_path: Path) -> None:
    net = saved(tmp_path, 3)
    net.set(8)
    with ar.CheckpointManager(net, tmp_path) as manager:
        manager.save(3)
    net.set(0)
    assert ar.CheckpointManager(net, tmp_path).restore()
    assert net.values == {8.0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]


def test_only_the_newest_stay(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 10, keep=2)
    assert CheckpointFolder(tmp_path).steps() == [10, 3]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_format_is_that_of_tensorflow(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    prefix = str(tmp_path / "step-00000004" / "variables")
    assert tf.train.list_variables(prefix) == [("layers/0", [ROWS, 2]), ("layers/1", [])]
    assert float(tf.train.load_variable(prefix, "layers/1")) == 4.0


def cut_off(file: Path) -> None:
    """Leave half of a file."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def another(file: Path) -> None:
    """Write JSON of another form."""
    file.write_text('{"step": [], "bytes": 0, "index": "", "sizes": {}}')


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "values are cut off": ("variables.data-00000-of-00001", cut_off),
    "a bit of a value": ("variables.data-00000-of-00001", flip),
    "values are gone": ("variables.data-00000-of-00001", Path.unlink),
    "a bit of the index": ("variables.index", flip),
    "the manifest is cut off": ("checkpoint.json", cut_off),
    "the manifest is another": ("checkpoint.json", another),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_of_a_damaged_checkpoint_the_one_before_is_taken_and_that_is_said(tmp_path: Path, what: str) -> None:
    net = saved(tmp_path, 1, 2)
    name, damage = DAMAGE[what]
    damage(tmp_path / "step-00000002" / name)
    net.set(0)
    with pytest.warns(UserWarning, match=r"step-00000002 is damaged"):
        found = ar.CheckpointManager(net, tmp_path).restore()
    assert found is not None
    assert (found.step, net.values) == (1, {1.0})
    with pytest.raises(ar.CheckpointError, match="damaged"):
        ar.CheckpointManager(net, tmp_path).restore(2)


def test_what_a_killed_process_left_is_not_taken_and_swept(tmp_path: Path) -> None:
    net = saved(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000002.alone-1")
    (tmp_path / "step-00000003").mkdir()  # somebody's own
    manager = ar.CheckpointManager(net, tmp_path)
    assert manager.steps == [1]
    assert not (tmp_path / ".step-00000002.alone-1").exists()


def test_where_nothing_can_be_written_the_next_call_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    manager = ar.CheckpointManager(Net(), tmp_path / "taken")

    def save() -> None:
        manager.save(1)  # the thread may fail, and say so, before this is back
        manager.wait()

    with pytest.raises(ar.CheckpointError, match="could not be written"), pytest.warns(UserWarning, match="step 1"):
        save()


def test_objects_without_variables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ar.GraphError, match="type dict has no variables"):
        ar.CheckpointManager({}, tmp_path)
    with pytest.raises(ar.ConfigError, match="max_to_keep"):
        ar.CheckpointManager(Net(), tmp_path, max_to_keep=0)


def test_a_checkpoint_of_something_else_is_refused_and_a_part_is_said(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(ar.CheckpointError, match="does not have 'w', which the program does"):
        ar.CheckpointManager(tf.train.Checkpoint(w=tf.Variable(1.0)), tmp_path).restore()
    smaller, more = Net(), Net()
    smaller.layers = [tf.Variable(np.zeros((3, 2))), tf.Variable(3)]
    with pytest.raises(ar.CheckpointError, match=r"'layers/0' is of shape \[40000, 2\]"):
        ar.CheckpointManager(smaller, tmp_path).restore()
    assert smaller.layers[1].numpy() == 3, "nothing was written"
    more.layers.append(tf.Variable(2.0))
    more.set(2)
    with pytest.raises(ar.CheckpointError, match="does not have 'layers/2', which the program does"):
        ar.CheckpointManager(more, tmp_path).restore()
    assert more.values == {2.0}, "nothing was written"


def test_values_of_what_the_program_has_yet_to_make_are_an_error_and_of_what_it_does_not_track_none(
    tmp_path: Path,
) -> None:
    net, optimizer = perceptron(), keras.optimizers.Adam(0.1)
    optimizer.build(net.trainable_variables)
    with ar.CheckpointManager(tf.train.Checkpoint(net=net, optimizer=optimizer), tmp_path) as manager:
        manager.save(1)
    again, fresh = perceptron(), keras.optimizers.Adam(0.1)
    with pytest.raises(ar.CheckpointError, match=r"(?s)does not have 'optimizer/.*optimizer\.build"):
        ar.CheckpointManager(tf.train.Checkpoint(net=again, optimizer=fresh), tmp_path).restore()
    assert ar.CheckpointManager(tf.train.Checkpoint(net=again), tmp_path).restore()
    assert all(np.array_equal(a, b) for a, b in zip(net.get_weights(), again.get_weights(), strict=True))


def test_a_model_without_variables_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Dense(3)])
    for _ in range(2):
        with pytest.raises(ar.GraphError, match="no variables yet"):
            ar.CheckpointManager(model, tmp_path).save(1)
        model.compile("adam", "mse")  # the optimizer has some already


def perceptron() -> Any:
    """Return a small Keras model with all kinds of variables."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(2), layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(2)]
    )


class Counting(keras.layers.Layer):
    """A layer with a metric and a variable of TensorFlow's."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.metrics.Mean()
        self.count = tf.Variable(0.0)

    def call(self, inputs: Any) -> Any:
        """Return what is given."""
        return inputs


class Holding(tf.Module):
    """A module with variables in a dictionary, a list and a model, and a generator of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {"a": tf.Variable(0.0), "more": [tf.Variable(0.0), keras.Variable(0.0)]}
        self.net = perceptron()
        self.random = tf.random.Generator.from_seed(1)


def adam() -> Any:
    """Return an optimizer that has its slots."""
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(perceptron().trainable_variables)
    return optimizer


def compiled(optimizer: str | keras.Optimizer) -> Any:
    """Return a compiled model."""
    model = perceptron()
    model.compile(optimizer, "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def of_tensorflow() -> Any:
    """Return an optimizer of TensorFlow's, which keeps slots, with the variable that they are for."""
    optimizer, variable = tf.compat.v1.train.AdamOptimizer(0.1), tf.Variable(1.0)
    optimizer.apply_gradients([(tf.constant(2.0), variable)])
    return tf.train.Checkpoint(optimizer=optimizer, variable=variable)


def of_model(model: Any) -> Any:
    """Return a model and its optimizer, as one writes them down."""
    return tf.train.Checkpoint(net=model, optimizer=model.optimizer)


def scaled() -> Any:
    """Return a program that keeps the scale of its loss."""
    net, optimizer = perceptron(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer.build(net.trainable_variables)
    return tf.train.Checkpoint(net=net, optimizer=optimizer)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a Keras model": (perceptron, lambda m: m.variables),
    "a compiled model": (lambda: compiled("adam"), lambda m: [*m.variables, *m.optimizer.variables]),
    "a tracked model, compiled": (
        lambda: tf.train.Checkpoint(net=compiled("adam")),
        lambda c: [*c.net.variables, *c.net.optimizer.variables],
    ),
    "a model and its optimizer": (
        lambda: of_model(compiled("adam")),
        lambda c: [*c.net.variables, *c.optimizer.variables],
    ),
    "a Keras layer": (Counting, lambda layer: [*layer.mean.variables, layer.count]),
    "a model with a layer of its own": (
        lambda: keras.Sequential([keras.Input((3,)), Counting(), keras.layers.Dense(1)]),
        lambda m: [*m.variables, *m.layers[0].mean.variables, m.layers[0].count],
    ),
    "a Keras optimizer": (adam, lambda optimizer: optimizer.variables),
    "a Keras optimizer around another": (scaled, lambda c: [*c.net.variables, *c.optimizer.variables]),
    "a Keras metric": (keras.metrics.Mean, lambda metric: metric.variables),
    "a seed generator": (lambda: keras.random.SeedGenerator(3), lambda seed: [seed.state]),
    "Keras variables": (lambda: tf.train.Checkpoint(w=keras.Variable([1.0, 2.0])), lambda c: [c.w]),
    "a module": (Holding, lambda m: [*m.variables, *m.net.variables, m.found["more"][1], m.random.state]),
    "lists and dictionaries": (
        lambda: tf.train.Checkpoint(a=[tf.Variable(1.0)], b={"c": [keras.Variable(2)]}),
        lambda c: [c.a[0], c.b["c"][0]],
    ),
    "slots of an optimizer of TensorFlow's": (
        of_tensorflow,
        lambda c: [c.variable, *c.optimizer.variables()],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_program_tracks_is_saved_and_restored(tmp_path: Path, kind: str) -> None:
    make, state = KINDS[kind]
    keras.utils.clear_session()
    one = make()
    for at, variable in enumerate(state(one)):
        variable.assign(tf.cast(tf.fill(variable.shape, at + 2), variable.dtype))
    count = len(state(one))
    with ar.CheckpointManager(one, tmp_path) as manager:
        manager.save(1)
    keras.utils.clear_session()  # as in another process: layers are named alike
    other = make()
    assert ar.CheckpointManager(other, tmp_path).restore()
    assert [np.unique(np.asarray(variable)).tolist() for variable in state(other)] == [[at + 2] for at in range(count)]


def test_a_model_may_be_made_after_others_that_draw(tmp_path: Path) -> None:
    keras.utils.clear_session()
    model = perceptron()
    model.layers[1].seed_generator.state.assign([5, 7])
    with ar.CheckpointManager(model, tmp_path) as manager:
        manager.save(1)
    keras.utils.clear_session()
    keras.random.SeedGenerator(1)  # the next is seed_generator_1
    again = perceptron()
    assert ar.CheckpointManager(again, tmp_path).restore()
    assert np.asarray(again.layers[1].seed_generator.state.value).tolist() == [5, 7]


@pytest.mark.parametrize("is_built", [True, False])
def test_an_optimizer_may_be_built_by_itself_or_in_its_first_step(tmp_path: Path, is_built: bool) -> None:
    models = []
    for _ in range(2):
        keras.utils.clear_session()  # or the second would have other names
        models.append(perceptron())
        models[-1].compile(keras.optimizers.Adafactor(0.1), "mse")
    saved, again = models
    if is_built:
        again.optimizer.build(again.trainable_variables)
    saved.optimizer.apply([tf.ones(weight.shape) for weight in saved.trainable_variables], saved.trainable_variables)
    with ar.CheckpointManager(saved, tmp_path) as manager:
        manager.save(1)
    assert ar.CheckpointManager(again, tmp_path).restore()
    assert int(again.optimizer.iterations.numpy()) == 1


def test_tables_and_the_place_in_a_dataset_are_saved_and_restored(tmp_path: Path) -> None:
    def program() -> tf.train.Checkpoint:
        data = iter(tf.data.Dataset.range(10).shuffle(10, seed=1))
        table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        return tf.train.Checkpoint(data=data, table=table, count=tf.Variable(0))

    one, other = program(), program()
    drawn = [int(next(one.data)) for _ in range(4)]
    one.table.insert(tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64))
    with ar.CheckpointManager(one, tmp_path) as manager:
        manager.save(1)
        drawn += [int(next(one.data))]  # not in what was saved
    assert ar.CheckpointManager(other, tmp_path).restore()
    assert list(other.table.lookup(tf.constant(["a", "b", "c"])).numpy()) == [1, 2, -1]
    assert sorted(drawn[:4] + [int(number) for number in other.data]) == list(range(10))


def test_what_tensorflow_cannot_save_is_refused_by_its_way(tmp_path: Path) -> None:
    data = iter(tf.data.Dataset.from_generator(lambda: range(3), output_signature=tf.TensorSpec([], tf.int32)))
    with pytest.raises(ar.GraphError, match=r"'place/data' \(OwnedIterator\) cannot be saved"):
        ar.CheckpointManager(tf.train.Checkpoint(place={"data": data}, w=tf.Variable(1.0)), tmp_path)
    with pytest.raises(ar.GraphError, match="each worker has its place"):
        target_of(tf.train.Checkpoint(data=iter(tf.data.Dataset.range(3))), workers=2)


def test_the_way_to_a_weight_is_the_same_with_its_optimizer_and_without() -> None:
    net, optimizer = perceptron(), keras.optimizers.Adam(0.1)
    optimizer.build(net.trainable_variables)
    alone = target_of(tf.train.Checkpoint(net=net)).common
    assert alone.keys() <= target_of(tf.train.Checkpoint(a=optimizer, net=net)).common.keys()


EXTENTS = {"a": StoredShape((1000, 32), 256_000), "b": StoredShape((), 8), "c": StoredShape((70, 900), 504_000)}
VALUES = {name: np.random.default_rng(0).normal(size=extent.shape) for name, extent in EXTENTS.items()}


def of_workers(folder: Path, tasks: list[int], count: int, seconds: float = 30.0) -> list[Exception | None]:
    """Let some of several workers save together, each in a thread; return their errors."""
    names = [f"worker {task} (10.0.0.{task}:2222)" for task in range(count)]
    home = CheckpointFolder(folder)
    errors: list[Exception | None] = [None] * len(tasks)

    def work(at: int) -> None:
        one = JointSave(home, home.partial(5, "test-1"), Label(5), tasks[at], names, seconds)
        try:
            one.run(deal(EXTENTS, count)[tasks[at]], VALUES)
        except Exception as error:
            errors[at] = error

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_of_several_workers_come_to_whole_variables(tmp_path: Path, count: int) -> None:
    assert of_workers(tmp_path, list(range(count)), count) == [None] * count
    found = dict(read(tmp_path / "step-00000005" / "variables", list(VALUES)))
    assert all(np.array_equal(found[name], value) for name, value in VALUES.items())
    files = [file.stat().st_size for file in (tmp_path / "step-00000005").glob("*.data-*")]
    assert len(files) == count
    assert max(files) < 1.2 * sum(files) / count


def test_a_worker_that_does_not_save_is_named_to_all(tmp_path: Path) -> None:
    errors = of_workers(tmp_path, [0, 2], 3, seconds=0.5)
    assert CheckpointFolder(tmp_path).steps() == []
    assert all("worker 1 (10.0.0.1:2222)" in str(error) or "worker 0" in str(error) for error in errors)
    assert isinstance(errors[0], ar.ClusterError)


def test_a_worker_that_cannot_write_is_named_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoints.write_part

    def full(prefix: Path, *args: Any) -> None:
        if prefix.name == "part-1":
            raise OSError(28, "No space left on device")
        write(prefix, *args)

    monkeypatch.setattr(checkpoints, "write_part", full)
    errors = of_workers(tmp_path, [0, 1, 2], 3)
    assert all("No space left on device" in str(error) for error in errors)
    assert "worker 1 (10.0.0.1:2222)" in str(errors[0])
    assert CheckpointFolder(tmp_path).steps() == []


@given(
    shapes=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 40)), max_size=6),
    workers=st.integers(1, 6),
)
def test_all_pieces_together_are_every_row_once(shapes: list[tuple[int, int]], workers: int) -> None:
    sizes = {f"v{number}": shape for number, shape in enumerate(shapes)}
    extents = {name: StoredShape(shape, shape[0] * shape[1] * 8) for name, shape in sizes.items()}
    shares = deal(extents, workers)
    rows: dict[str, list[int]] = {name: [] for name in extents}
    for piece in (piece for share in shares for piece in share):
        rows[piece.name] += range(*(piece.rows or (0, piece.shape[0])))
        assert piece.rows is None or extents[piece.name].size >= WHOLE_BELOW
    assert rows == {name: list(range(shape[0])) for name, shape in sizes.items()}
    assert len(shares) == workers


def test_slices_are_said_as_tensorflow_does() -> None:
    assert Piece("w", (10, 3, 2), (4, 9)).slice_spec == "10 3 2 4,5:-:-"
    assert Piece("w", (10,)).slice_spec == ""
