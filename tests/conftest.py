"""Give every test process one TensorFlow: quiet, on the CPU, with few threads and four virtual devices.

Only the tests that need TensorFlow import it. What must be set between its import and its first operation
is set by an import hook, so no test can come too early or too late for it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

pytest_plugins = ("tests.matrix.summary", "tests.jobs.programs.fixtures", "tests.slow")
VIRTUAL_DEVICES = 4
CERTIFIED = {"test_matrix": 3, "test_fuzz": 1, "test_verify": 1}
"""Test modules, of which every so manieth test has its rewrites certified; with AUTOGRAPH_CERTIFY=all, all tests of all
modules have."""

# Some 400,000 objects of modules live as long as a test process, and graphs make millions more. To walk through all of
# them as often as Python does by itself took a tenth of the time of tests, so that is done between tests only, where
# the process has grown. (Not `gc.freeze`: who asks how many objects are frozen, as `ir.gc_pause` does, counts them.)
GARBAGE = (1000, 10, 1_000_000)

GROWTH = 512 * 1024**2
"""Bytes by which a test process grows before garbage is collected: TensorFlow's sessions and graphs are large, and hang
on few of Python's objects. Without it two processes came to 22 GB."""

# One thread per operation: xdist's workers share the machine's cores, and tiny shapes gain nothing from more.
os.environ.update(
    CUDA_VISIBLE_DEVICES="-1",
    KERAS_BACKEND="tensorflow",
    OMP_NUM_THREADS="1",
    TF_NUM_INTEROP_THREADS="4",
    TF_NUM_INTRAOP_THREADS="1",
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def set_up_tensorflow(tf: ModuleType) -> None:
    """Split the CPU into virtual devices; TensorFlow allows it only before its first operation."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(VIRTUAL_DEVICES)]
    )


def handle_ignored_signals() -> None:
    """Do nothing on signals that this process ignores, as under nohup: children inherit only what is ignored."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


class TensorFlowHook(importlib.abc.MetaPathFinder):
    """Runs `set_up_tensorflow` once, right after the import of TensorFlow."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find TensorFlow where it is found without this hook, with a loader that sets it up as well."""
        if fullname != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_set_up(module: ModuleType) -> None:
            execute(module)
            set_up_tensorflow(module)

        spec.loader.exec_module = execute_and_set_up  # type: ignore[method-assign]
        return spec


class Collector:
    """Collects garbage after a test where the process has grown."""

    def __init__(self) -> None:
        self._kept = resident_bytes()

    def pytest_runtest_teardown(self) -> None:
        """Look how large the process is."""
        if resident_bytes() > self._kept + GROWTH:
            gc.collect()
            self._kept = resident_bytes()


def resident_bytes() -> int:
    """Return how much memory this process has; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def pytest_configure(config: pytest.Config) -> None:
    """Install the hook before any test module is imported, and let child processes get signals as they expect."""
    gc.set_threshold(*GARBAGE)
    config.pluginmanager.register(Collector())
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        handle_ignored_signals()
    if "tensorflow" in sys.modules:
        set_up_tensorflow(sys.modules["tensorflow"])
    else:
        sys.meta_path.insert(0, TensorFlowHook())


@pytest.fixture(autouse=True)
def certified_rewrites(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rewrites of `CERTIFIED` modules be compared with their originals after every pass."""
    every = CERTIFIED.get(request.module.__name__.rpartition(".")[2], 0)
    is_chosen = every and zlib.crc32(request.node.nodeid.encode()) % every == 0
    if not is_chosen and os.environ.get("AUTOGRAPH_CERTIFY") != "all":
        return
    from autograph_rewrite.certify.certificate import Certificate
    from autograph_rewrite.passes import pass_pipeline

    plain = pass_pipeline.rewrite

    @functools.wraps(plain)
    def certified(asked: Any, **options: Any) -> Any:
        if asked.certificate is None:
            asked = dataclasses.replace(asked, certificate=Certificate(strict=True))
        return plain(asked, **options)

    monkeypatch.setattr(pass_pipeline, "rewrite", certified)


@pytest.fixture(autouse=True)
def kept_float_type() -> Iterator[None]:
    """Let no test leave Keras with another float type to the tests behind it: Keras keeps two of them."""
    yield
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        assert (keras.config.floatx(), keras.config.dtype_policy().name) == ("float32", "float32")


@pytest.fixture(autouse=True)
def forgotten_passes() -> Iterator[None]:
    """Let no test leave a pass or an op of its own to the tests after it."""
    yield
    own_passes = sys.modules.get("autograph_rewrite.plan.user_extensions")
    for name in list(own_passes.registered_passes()) if own_passes is not None else ():
        own_passes.unregister_pass(name)
    own_ops = sys.modules.get("autograph_rewrite.ops.rules.registered")
    for name in own_ops.registered() if own_ops is not None else ():
        own_ops.unregister(name)


@pytest.fixture(scope="session")
def fresh_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs code in a new interpreter: for what happens once per process."""

    def run(code: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
