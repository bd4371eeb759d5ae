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
from autograph_rewrite.runtime.checkpoints import joint_save
from autograph_rewrite.runtime.checkpoints.bundle import read
from autograph_rewrite.runtime.checkpoints.deal import WHOLE_BELOW, Extent, Piece, deal
from autograph_rewrite.runtime.checkpoints.folder import CheckpointFolder, Label
from autograph_rewrite.runtime.checkpoints.joint_save import JointSave

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
    go, write = threading.Event(), joint_save.write_part

    def late(*args: Any) -> None:
        assert go.wait(60)
        write(*args)

    monkeypatch.setattr(joint_save, "write_part", late)
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
    with pytest.raises(ar.CheckpointError, match="none of the variables"):
        ar.CheckpointManager(tf.train.Checkpoint(w=tf.Variable(1.0)), tmp_path).restore()
    smaller, more = Net(), Net()
    smaller.layers = [tf.Variable(np.zeros((3, 2))), tf.Variable(3)]
    with pytest.raises(ar.CheckpointError, match=r"'layers/0' is of shape \[40000, 2\]"):
        ar.CheckpointManager(smaller, tmp_path).restore()
    assert smaller.layers[1].numpy() == 3, "nothing was written"
    more.layers.append(tf.Variable(2.0))
    with pytest.warns(UserWarning, match="does not have layers/2: they stay"):
        assert ar.CheckpointManager(more, tmp_path).restore()
    assert more.values == {1.0, 2.0}


def test_a_model_without_variables_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ar.GraphError, match="no variables yet"):
        ar.CheckpointManager(keras.Sequential([keras.layers.Dense(3)]), tmp_path).save(1)


EXTENTS = {"a": Extent((1000, 32), 256_000), "b": Extent((), 8), "c": Extent((70, 900), 504_000)}
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
    write = joint_save.write_part

    def full(prefix: Path, *args: Any) -> None:
        if prefix.name == "part-1":
            raise OSError(28, "No space left on device")
        write(prefix, *args)

    monkeypatch.setattr(joint_save, "write_part", full)
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
    extents = {name: Extent(shape, shape[0] * shape[1] * 8) for name, shape in sizes.items()}
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
