"""What `import autograph_rewrite` gives, and what it must not cost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import autograph_rewrite as ar
from autograph_rewrite import requires
from tests.support import recorded_launchers

Run = Callable[..., subprocess.CompletedProcess[str]]

ENTRY_POINTS = {"GraphItem", "Config", "Plan", "build_plan", "rewrite", "distribute", "verify"}
VIEWS = {"dump", "diff", "explain"}
ERRORS = {"ConfigError", "PlanError", "GraphError", "PassError", "VerifyError", "ClusterError"}
HEAVY = {"tensorflow", "keras", "numpy", "networkx", "pydantic", "google.protobuf", "rich"}


@pytest.mark.parametrize("name", ar.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(ar, name).__name__ == name


def test_the_names_of_the_contract_are_public() -> None:
    assert {*ENTRY_POINTS, *VIEWS, *ERRORS, "RewriteError"} <= set(ar.__all__)
    assert set(ar.__all__) <= set(dir(ar))
    assert sorted(ar.__all__) == ar.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rewrit'"):
        ar.rewrit  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_loads_no_heavy_module(fresh_python: Run) -> None:
    done = fresh_python("import sys, autograph_rewrite; print(*sys.modules)")
    assert done.stderr == ""
    assert HEAVY & set(done.stdout.split()) == set()


def test_the_help_of_the_command_does_not_start_tensorflow(fresh_python: Run) -> None:
    done = fresh_python(
        "import sys\n"
        "from autograph_rewrite.tools.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    print('code', end.code, 'tensorflow' in sys.modules)\n"
    )
    assert done.stdout.endswith("code 0 False\n")


def test_the_command_runs_without_a_script_on_the_path() -> None:
    line = [sys.executable, "-m", "autograph_rewrite", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"autograph-rewrite {ar.__version__}\n"


TWO_WORKERS = '{"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}'


@pytest.mark.parametrize("environ", [{"TF_CONFIG": TWO_WORKERS}, {"TF_CONFIG": "{"}, {"WORLD_SIZE": "2", "RANK": "0"}])
def test_importing_the_package_in_a_job_loads_no_heavy_module(
    environ: dict[str, str], fresh_python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    done = fresh_python("import sys, autograph_rewrite; print(*sys.modules)")
    assert done.stderr == ""
    assert HEAVY & set(done.stdout.split()) == set()


HOOKED = "any(type(finder).__module__.endswith('join_on_import') for finder in sys.meta_path)"


@pytest.mark.parametrize("job", recorded_launchers.JOBS)
def test_every_rank_of_every_launcher_waits_for_tensorflow_to_join(
    job: str, fresh_python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for environ in recorded_launchers.JOBS[job]:
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            done = fresh_python(f"import sys, autograph_rewrite; print({HOOKED})")
        assert done.stdout == "True\n", (environ, done.stderr)


def test_only_the_script_joins_a_job_and_not_the_command_that_runs_it(tmp_path: Path, fresh_python: Run) -> None:
    (tmp_path / "s.py").write_text(f"import sys; print({HOOKED})")
    done = fresh_python(
        "import os, sys, autograph_rewrite\n"
        f"os.environ['TF_CONFIG'] = '{TWO_WORKERS}'\n"  # as in an actor that has imported the package before
        "from autograph_rewrite.tools.cli import main\n"
        "from autograph_rewrite.runtime.job.join_on_import import join_on_import\n"
        "join_on_import()\n"
        f"main(['completion', 'bash'])\nprint({HOOKED})\n"
        f"main(['run', {str(tmp_path / 's.py')!r}])\n"
    )
    assert done.stdout.splitlines()[-2:] == ["False", "True"], done.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "import autograph_rewrite; import tensorflow",
        "import tensorflow; import autograph_rewrite",
        "import autograph_rewrite; import tensorflow.python.eager.context; import tensorflow",
    ],
)
def test_a_process_of_a_job_joins_when_tensorflow_is_imported(
    imports: str, fresh_python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", TWO_WORKERS)
    done = fresh_python(
        f"{imports}\n"
        "import inspect, sys, tensorflow\n"
        "from tensorflow.python.eager import context\n"
        "print(context.context()._collective_ops_server_def.member.name, 'join_on_import' in str(sys.meta_path))\n"
        "print(inspect.getsource(tensorflow)[:1], type(tensorflow.__spec__.loader).__name__)\n"
    )
    assert done.stdout == "worker 1 False\n# SourceFileLoader\n", done.stderr[-2000:]


@pytest.mark.parametrize(("config", "devices"), [("all_reduce_4_mirrored", 4), ("all_reduce_4", 1), ("missing", 1)])
def test_a_program_that_starts_tensorflow_first_has_the_devices_that_the_command_line_names(
    config: str, devices: int, fresh_python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOGRAPH_REWRITE_CONFIG", config)
    done = fresh_python(
        "import autograph_rewrite, tensorflow as tf\n"
        "tf.constant(1) + 1\n"
        "print(len(tf.config.list_logical_devices('CPU')))\n"
    )
    assert done.stdout == f"{devices}\n", done.stderr[-2000:]


def test_an_import_of_tensorflow_that_fails_says_what_it_says_without_us(
    tmp_path: Path, fresh_python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", TWO_WORKERS)
    (tmp_path / "tensorflow.py").write_text("import missing_part")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = fresh_python("import autograph_rewrite; import tensorflow")
    assert "ModuleNotFoundError: No module named 'missing_part'" in done.stderr


def test_a_missing_tensorflow_is_explained_at_first_use(fresh_python: Run) -> None:
    done = fresh_python(
        "import sys\n"
        "sys.modules['tensorflow'] = None\n"
        "import autograph_rewrite\n"
        "from autograph_rewrite.requires import tensorflow\n"
        "tensorflow()\n"
    )
    assert "ClusterError: TensorFlow is not installed" in done.stderr
    assert "autograph-rewrite[cpu]" in done.stderr


@pytest.mark.parametrize("version", ["2.9.0", "2.15.1", "1.15.5", ""])
def test_an_old_tensorflow_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(__version__=version))
    with pytest.raises(ar.ClusterError, match=f"'{version}' is too old: 2.16 or later"):
        requires.tensorflow.__wrapped__()


@pytest.mark.parametrize("version", ["2.16.0", "2.18.1", "2.21.0", "2.21.0-rc1"])
def test_a_tested_tensorflow_is_accepted(version: str) -> None:
    requires.check_tensorflow_version(version)


@pytest.mark.parametrize("version", ["2.22.0-rc0", "2.100.0", "3.0"])
def test_a_tensorflow_newer_than_what_was_tested_is_warned_of(version: str) -> None:
    with pytest.warns(UserWarning, match=f"tested with TensorFlow 2.16 to 2.21, not with {version}"):
        requires.check_tensorflow_version(version)
