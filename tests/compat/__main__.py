"""Install the package with each TensorFlow as pip resolves it, run it, and let each read what the others wrote.

python -m tests.compat                    all of VERSIONS: installed, demo, tests, a job, files of the others
python -m tests.compat --only 2.16 --parts demo job
python -m tests.compat --only 2.21 --python python3.13 --parts install demo
python -m tests.compat --table            writes what was measured into the table of docs/versions.md

Each version has an environment below build/compat, which stays; results go into out/compat.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

VERSIONS = ("2.16", "2.18", "2.20", "2.21")
FOLDER, RESULTS, PAGE = ROOT / "build" / "compat", ROOT / "out" / "compat.json", ROOT / "docs" / "versions.md"
TOOLS = ("hypothesis", "pytest>=8", "pytest-timeout", "pytest-xdist", "scikit-learn", "setuptools>=77", "wheel")
TESTS = (
    "runtime passes normalize load plan ir rules analysis matrix zoo strategies certify cost inspect test_compile.py"
)
"""Below tests/: what rewrites, trains, reads or writes graphs. The rest tests jobs, commands and the project itself."""
JOB = "tests/jobs/test_training.py::test_two_processes_train_one_model_in_each_mode"
SHOWN = ("tensorflow_cpu", "keras", "tf_keras", "numpy", "protobuf")
LIMIT = 3600


class Version:
    """One TensorFlow and its environment.

    Args:
        number: such as "2.16".
        interpreter: another one than that of this process; "": this one's.
    """

    def __init__(self, number: str, interpreter: str = "") -> None:
        self.number, self.interpreter = number, interpreter or sys.executable
        self.name = " ".join(filter(None, (number, Path(interpreter).name)))
        self.folder = FOLDER / self.name.replace(" ", "-")
        self.python = self.folder / "venv" / "bin" / "python"

    def run(self, *command: str, check: bool = True) -> str:
        """Run Python with arguments; return what it printed.

        Args:
            command: the arguments.
            check: whether it has to succeed.

        Raises:
            subprocess.SubprocessError: it failed, or took too long.
        """
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        said = self.folder / "said.txt"  # grows while it runs
        with open(self.folder / "log.txt", "a", encoding="utf-8") as log, open(said, "w", encoding="utf-8") as out:
            done = subprocess.run(
                [str(self.python), *command],
                cwd=ROOT,
                env=environ,
                stdout=out,
                stderr=log,
                text=True,
                timeout=LIMIT,
                check=False,
            )
        printed = said.read_text(encoding="utf-8")
        if check and done.returncode:
            raise subprocess.SubprocessError("\n".join(printed.splitlines()[-12:]))
        return printed

    def install(self) -> str:
        """Make the environment, without constraints; return the versions that pip has chosen."""
        if not self.python.exists():
            subprocess.run([self.interpreter, "-m", "venv", str(self.folder / "venv")], check=True)
        pip = ("-m", "pip", "-q", "--disable-pip-version-check", "install")
        self.run(*pip, *TOOLS)
        self.run(*pip, "--no-build-isolation", "-e", ".[cpu]", f"tensorflow-cpu=={self.number}.*")
        self.run(*pip, "--no-deps", f"tf_keras=={self.number}.*")
        wanted = f"from importlib.metadata import version as v; print(platform.python_version(), *map(v, {SHOWN}))"
        python, *versions = self.run("-c", f"import platform; {wanted}").split()
        return f"Python {python}; {', '.join(versions)}"

    def demo(self) -> str:
        """Run the demo; return the accuracies that it reached."""
        said = self.run("examples/digits.py", "--out", str(self.folder / "files"))
        return re.search(r"test accuracy (\S+) on one device, (\S+) over", said).expand(r"\1, \2")  # type: ignore[union-attr]

    def tests(self) -> str:
        """Run the tests; return how many passed, and how many were skipped."""
        return self._passed("-n", "2", "-m", "not slow and not full", *(f"tests/{name}" for name in TESTS.split()))

    def job(self) -> str:
        """Run a job of two processes in each mode; return how many passed."""
        return self._passed(JOB)

    def _passed(self, *given: str) -> str:
        lines = self.run("-m", "pytest", "-q", *given, check=False).splitlines()  # it fails where a test is slow, too
        if not re.match(r"\d+ passed", lines[-1]):
            raise subprocess.SubprocessError("\n".join(line for line in lines[-20:] if not line.startswith("  ")))
        return lines[-1].partition(" in ")[0]

    def files(self) -> str:
        """Verify what all versions wrote; return whose files were read."""
        others = [str(path.parent) for path in sorted(FOLDER.glob("*/files/plan.yaml"))]
        self.run("tests/compat/exchange.py", *others)
        return ", ".join(Path(path).parent.name for path in others)


PARTS = ("install", "demo", "tests", "job", "files")


def measured(part: Callable[[], str]) -> dict[str, Any]:
    """Return what a part says, and how long it took."""
    began = time.monotonic()
    try:
        said, is_good = part(), True
    except (subprocess.SubprocessError, OSError) as error:
        said, is_good = str(error), False
    return {"ok": is_good, "said": said, "seconds": round(time.monotonic() - began)}


def table(results: dict[str, dict[str, Any]], page: str = "") -> str:
    """Return the results as a table of Markdown.

    Args:
        results: of versions, for each of their parts.
        page: a table of earlier results, which stay where there is none.
    """
    rows = [re.split(r" \| ", line.strip("| ")) for line in page.splitlines() if re.match(r"\| \d", line)]
    earlier = {row[0]: dict(zip(PARTS, row[1:], strict=True)) for row in rows}
    lines = ["| TensorFlow | " + " | ".join(PARTS) + " |", "| --- |" + " --- |" * len(PARTS)]
    for number in sorted({*results, *earlier}):
        own, known = results.get(number, {}), earlier.get(number, {})
        cells = [_cell(own[part]) if part in own else known.get(part, "not run") for part in PARTS]
        lines.append(f"| {number} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(one: dict[str, Any]) -> str:
    return f"{one['said'] if one['ok'] else 'failed'} ({one['seconds']} s)"


def main() -> None:
    """Run what is asked for, one part of all versions after the other: files are read when all have written theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--python", default="", help="another interpreter")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if given.table:
        page = PAGE.read_text(encoding="utf-8")
        begin, end = "<!-- compat -->\n", "\n<!-- end -->"
        before, _, rest = page.partition(begin)
        shown, _, after = rest.partition(end)
        PAGE.write_text(before + begin + table(results, shown) + end + after, encoding="utf-8")
        return
    for part in given.parts:
        for number in given.only:
            version = Version(number, given.python)
            version.folder.mkdir(parents=True, exist_ok=True)
            one = results.setdefault(version.name, {})[part] = measured(getattr(version, part))
            print(
                f"{version.name} {part}: {'ok' if one['ok'] else 'FAILED'} ({one['seconds']} s) {one['said']}",
                flush=True,
            )
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1))
    names = [Version(number, given.python).name for number in given.only]
    sys.exit(any(not one["ok"] for name in names for one in results[name].values()))


if __name__ == "__main__":
    main()
