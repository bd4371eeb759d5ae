"""Options of elastic jobs that do not fit each other are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from autograph_rewrite.tools.cli import main
from autograph_rewrite.tools.launcher.agent_arguments import TOKEN

HOSTS = ["--rdzv-endpoint", "127.0.0.1:29400", "--nproc-per-node", "1"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["-n", "2", "--snapshot-dir", "kept"], "only an elastic job has snapshots"),
        (["--elastic", "1:2", "--snapshot-dir", "kept", *HOSTS], "--snapshot-dir is for the jobs of one host"),
        (["--elastic", "1:2", "-n", "3"], "-n is 3, but --elastic 1:2 begins with 2"),
        (HOSTS, "how many workers may the job have?"),
        (["--elastic", "1:2", "--nproc-per-node", "1"], "where do the hosts meet?"),
        (["--elastic", "1:2", *HOSTS[:2]], "how many workers does this host run?"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(
    options: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TOKEN, "0123456789abcdef")
    (tmp_path / "s.py").touch()
    assert main(["launch", *options, "s.py"]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()
