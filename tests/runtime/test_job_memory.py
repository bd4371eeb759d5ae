"""The memory of an elastic job: what is kept, by whom, and where a loop of the program's own goes on."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest

from autograph_rewrite.errors import ConfigError
from autograph_rewrite.runtime.job.job_memory import EXPELLED, JobMemory, OwnedMemory, Snapshot
from autograph_rewrite.runtime.job.own_loop import Array, OwnLoop, set_state, state_of
from autograph_rewrite.runtime.keras_fit import FitPosition, make_elastic
from autograph_rewrite.tools.launcher.job import Outcome
from autograph_rewrite.tools.launcher.launch_elastic import KeptSnapshots, report_of
from tests.support.paths import ROOT

FIRST = Snapshot({"epoch": 1}, [np.arange(3.0)])
WRITER = """
import sys, time
from pathlib import Path
from autograph_rewrite.runtime.job.job_memory import JobMemory, Snapshot
memory = JobMemory(Path(sys.argv[1]), 1, 0)
{}
print("it went on")
"""


@pytest.fixture
def owned() -> Iterator[OwnedMemory]:
    """Return the memory of a job."""
    with OwnedMemory() as made:
        yield made


def start(owned: OwnedMemory, does: str) -> subprocess.Popen[str]:
    """Start a worker of generation 1 that does something."""
    line = [sys.executable, "-c", WRITER.format(does), str(owned.folder)]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def loop(owned: OwnedMemory, generation: int) -> OwnLoop:
    """Return the loop of worker 0, which takes a snapshot before every other step."""
    made = OwnLoop(owned.begin(generation))
    made.every = 2
    return made


def test_a_snapshot_keeps_types_that_the_files_of_numpy_lack(owned: OwnedMemory) -> None:
    memory = owned.begin(1)
    given = [np.array([1.5, -2.0], ml_dtypes.bfloat16), np.array([True]), np.array(3, np.int64)]
    memory.save("loop", Snapshot({}, given))
    found = memory.load("loop")
    assert found is not None
    assert [array.dtype for array in found.arrays] == [array.dtype for array in given]
    assert all(np.array_equal(a, b) for a, b in zip(found.arrays, given, strict=True))


def test_the_last_snapshot_comes_back_whole(owned: OwnedMemory) -> None:
    memory = owned.begin(1)
    assert memory.load("fit-1") is None
    memory.save("fit-1", Snapshot({"epoch": 0}, []))
    memory.save("fit-1", FIRST)
    (owned.folder / "new-1-fit-1.npz").write_bytes(b"half of one")  # who wrote it was killed
    found = owned.begin(2).load("fit-1")
    assert found is not None
    assert found.position == FIRST.position
    assert np.array_equal(found.arrays[0], FIRST.arrays[0])


def test_who_was_expelled_keeps_nothing_any_more(owned: OwnedMemory) -> None:
    owned.begin(1).save("loop", FIRST)
    owned.begin(2)
    late = start(owned, "memory.save('loop', Snapshot({'epoch': 9}, []))")
    assert late.wait(60) == EXPELLED
    assert late.stdout is not None
    assert late.stdout.read() == ""
    found = JobMemory(owned.folder, 2).load("loop")
    assert found is not None
    assert found.position == FIRST.position


def test_who_was_expelled_ends_with_its_next_sign_of_life(owned: OwnedMemory) -> None:
    memory = owned.begin(1)
    worker = start(owned, "memory.beat(0.05); time.sleep(60)")
    end = time.monotonic() + 60
    while not (owned.folder / "beat-1-0").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert worker.poll() is None
    assert memory.silence(0) < 30
    owned.begin(2)
    assert worker.wait(30) == EXPELLED


def test_nothing_is_left_of_a_job(owned: OwnedMemory) -> None:
    with OwnedMemory() as other:
        folder = other.folder
        assert folder.stat().st_mode & 0o077 == 0
        other.begin(1).save("loop", FIRST)
    assert not Path(folder).exists()


def test_callbacks_get_back_what_they_remember() -> None:
    before = keras.callbacks.EarlyStopping("loss", patience=3, min_delta=0.1)
    before.monitor_op = keras.ops.less
    before.min_delta, before.wait, before.best = -0.1, 2, np.float64(0.25)
    before.best_weights = [np.ones((2, 3)), np.zeros(2)]
    before.file = sys.stdout
    arrays: list[Array] = [np.zeros(1)]
    state = state_of(before, arrays)
    after = keras.callbacks.EarlyStopping("loss", patience=3, min_delta=0.1)
    set_state(after, state, arrays)
    assert (after.min_delta, after.wait, after.best) == (-0.1, 2, 0.25)
    assert after.monitor_op is keras.ops.less
    assert [weight.shape for weight in after.best_weights] == [(2, 3), (2,)]
    assert not hasattr(after, "file")


def test_a_loop_that_nobody_leads_is_refused(owned: OwnedMemory) -> None:
    made = loop(owned, 1)
    with pytest.raises(ConfigError, match=r"the loop around 'step'.*\n.*ar\.on_resize"):
        made.before("'step'", dict)


def batches(owned: OwnedMemory, generation: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> Array:
    """Run a loop around train_on_batch from where the last snapshot was taken; return the weights."""
    memory = owned.begin(generation)
    made = OwnLoop(memory)
    made.every = 2
    monkeypatch.setattr(OwnLoop, "here", classmethod(lambda _: made))
    keras.utils.set_random_seed(generation)  # weights that are not those of the snapshot
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    make_elastic(model, memory, 2)
    begin = [0]
    made.on_resize(lambda done: begin.__setitem__(0, done))
    for number in range(begin[0], steps):
        model.train_on_batch(np.full((2, 3), number / 8), np.ones((2, 1)))
    return np.concatenate([np.ravel(np.asarray(variable)) for variable in (*model.weights, *model.optimizer.variables)])


def test_a_loop_around_train_on_batch_goes_on_where_the_last_snapshot_was_taken(
    owned: OwnedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = batches(owned, 1, 5, monkeypatch)
    (owned.folder / "loop.npz").unlink()
    whole = batches(owned, 1, 8, monkeypatch)
    (owned.folder / "loop.npz").unlink()
    batches(owned, 1, 7, monkeypatch)
    assert np.array_equal(batches(owned, 2, 8, monkeypatch), whole)
    assert not np.array_equal(short, whole)


def test_a_loop_around_train_on_batch_that_nobody_leads_is_refused(
    owned: OwnedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop(owned, 1)
    monkeypatch.setattr(OwnLoop, "here", classmethod(lambda _: made))
    model = SimpleNamespace(fit=lambda: None, train_on_batch=lambda x, y: None)
    make_elastic(model, owned.begin(1), 2)
    with pytest.raises(ConfigError, match="train_on_batch"):
        model.train_on_batch(1, 2)


def test_a_dataset_without_end_leads_nobody(owned: OwnedMemory) -> None:
    made = loop(owned, 1)
    made.batches(range(3), ends=False)
    with pytest.raises(ConfigError, match=r"ar\.on_resize"):
        made.before("'step'", dict)


def run(made: OwnLoop, steps: int) -> list[Any]:
    """Run a loop over six batches, again and again, until so many steps are done; the second time it leaves early."""
    data, seen = made.batches(range(6), ends=True), list[Any]()
    for iteration in range(4):
        for batch in data:
            if len(seen) == steps:
                return seen
            made.before("step", lambda: {"w": np.float64(len(seen))})
            seen.append((iteration, batch))
            made.after("step")
            if iteration == 1 and batch == 2:
                break
    return seen


def test_a_loop_goes_on_at_the_batch_after_the_last_snapshot(owned: OwnedMemory) -> None:
    whole = run(loop(owned, 1), 100)
    for steps in range(3, len(whole)):
        (owned.folder / "loop.npz").unlink(missing_ok=True)
        assert run(loop(owned, 2), steps) == whole[:steps]
        again = loop(owned, 3)
        kept = steps - 1 - (steps - 1) % 2
        assert again.values("step", ["w", "new"]).keys() == {"w"}
        assert again.values("step", ["w"])["w"] == kept
        assert run(again, 100) == whole[kept:]


def test_a_program_is_told_how_many_steps_are_done(owned: OwnedMemory) -> None:
    told: list[int] = []
    first = loop(owned, 1)
    first.on_resize(told.append)
    for _ in range(6):
        first.before("step", dict)
        first.after("step")
    loop(owned, 2).on_resize(told.append)
    assert told == [4]


def test_a_snapshot_that_waits_to_be_copied_says_so(
    owned: OwnedMemory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autograph_rewrite.runtime.job.job_memory._TELL", 0.1)
    memory = owned.begin(1, lease=60.0)
    memory.save("loop", FIRST)
    written = (owned.folder / "loop.npz").stat().st_mtime_ns
    copied = threading.Timer(0.5, memory.note_copied, ("loop", written))
    copied.start()
    memory.save("loop", FIRST)
    copied.join()
    said = capsys.readouterr().err
    assert said.count("worker 0 has waited 0 s for its last snapshot to be copied to a second host") == 1


def test_what_a_job_leaves_is_whole_and_goes_with_one_that_comes_to_its_end(owned: OwnedMemory, tmp_path: Path) -> None:
    kept = KeptSnapshots(tmp_path / "kept")
    assert not kept.restore(owned.folder)
    assert not kept.keep(owned.folder), "nothing was taken yet"
    owned.begin(1).save("loop", FIRST)
    (owned.folder / "new-1-loop.npz").write_bytes(b"half")
    assert kept.keep(owned.folder)
    owned.begin(2).save("fit-1", FIRST)
    assert kept.keep(owned.folder)
    (tmp_path / "kept" / "000007.coming").mkdir()  # of a launcher that was killed
    with OwnedMemory() as other:
        assert kept.restore(other.folder)
        assert other.seed == owned.seed
        assert sorted(path.name for path in other.folder.glob("*.npz")) == ["fit-1.npz", "loop.npz"]
        found = other.begin(1).load("loop")
    assert found is not None
    np.testing.assert_array_equal(found.arrays[0], FIRST.arrays[0])
    assert len(list((tmp_path / "kept").glob("*"))) == 2, "one that is whole, and one that never will be"
    kept.clear()
    assert not list((tmp_path / "kept").iterdir())


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make the folder"):
        KeptSnapshots(tmp_path / "file" / "kept")


@pytest.mark.parametrize("rank", [0, 1])
def test_every_worker_makes_the_variables_that_the_first_snapshot_of_a_fit_reads(owned: OwnedMemory, rank: int) -> None:
    owned.begin(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    position = FitPosition(JobMemory(owned.folder, 1, rank), "fit-1", 4, [])
    position.set_model(model)
    position.on_train_begin()
    assert model.optimizer.built, "made while a step is traced it would give the graph other names"


@pytest.mark.parametrize(
    ("code", "is_refused", "is_lost"), [(2, False, True), (2, True, False), (-9, True, True)], ids=str
)
def test_a_program_that_is_refused_has_lost_nobody(
    owned: OwnedMemory, code: int, is_refused: bool, is_lost: bool
) -> None:
    memory = owned.begin(1)
    if is_refused:
        memory.refuse()
    found = report_of(Outcome({"worker 0": -15, "worker 1": code}, "worker 1"), memory)
    assert bool(found.words) == is_lost
