"""docs/corpus.md, from the lines of a run: totals, a row for each program, and why something is not exact or slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tests.corpus import catalogue
from tests.corpus.configurations import CONFIGURATIONS, DESCRIPTIONS
from tests.corpus.program import Library, Program
from tests.corpus.words import BAD, ENOUGH, OUTCOMES

Line = dict[str, Any]
ALL_REDUCE = ("all_reduce_2", "mirrored_3")
SHORT = {"not installed": "-", "": "not run"}
WIDTH = 220

INTRODUCTION = """\
# A corpus of programs

Programs written as the users of public libraries write them, each trained on one device and distributed: the same
initial values, the same data, two steps; every output, variable and slot of the optimizer is compared after every
step, all copies. `make corpus` runs them (each program in a child process with a time limit) and writes this page;
`make corpus ARGS="--only dcgan,vit"` runs some. The sizes are small, so that a program takes seconds;
one run in six goes through TensorFlow's own optimisations of graphs, which take longer than that.

- **exact**: no value differs by more than 1e-9 of its tensor's largest value (3e-5 where the library computes in
  float32), or by more than 16 times what changing the variables in their last bit does to that tensor of the original.
- **refused**: an error of this package says why not. **wrong**, **foreign** (any other exception), **hang**: defects.
- **broken**: the program itself cannot be built or trained on one device here. **not installed**: a library is missing.
- **error**: the largest one within the tolerance, over all configurations; **noise**: what the change in the last bit
  does to that tensor; **rounding**: how many tensors were over the tolerance, and explained by their own noise.
- **coverage**: the smallest share of the step's floating-point work that is divided over the devices, of the AllReduce
  configurations, for 32 examples on each replica; below 90 % the page says why.
- **rewrite**: seconds that the longest rewrite took, on a busy machine.

The programs of `tf_keras` take five steps. Hugging Face transformers 4.57 is the last release with TensorFlow models.
`tf-models-official` 2.20 asks for TensorFlow 2.20 and works with 2.21.
Two libraries are not part of the corpus, because no version of them can be imported with TensorFlow 2.16 or later:
`tensorflow-ranking` 0.5.5 imports `tf.estimator`, and nobody maintains `tensorflow-addons` 0.23 any more.

The configurations:

"""


def summary(lines: Sequence[Line]) -> list[str]:
    """Return the totals."""
    counts = Counter(line["outcome"] for line in lines)
    programs = len({line["program"] for line in lines})
    text = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name] or name in BAD)
    return [f"{programs} programs, {len(lines)} runs: {text}"]


def page(lines: Sequence[Line]) -> str:
    """Return the page."""
    found = {(line["program"], line["configuration"]): line for line in lines}
    known = [line for line in lines if line["program"] in catalogue.programs()]
    parts = [INTRODUCTION, *(f"- `{one.name}`: {DESCRIPTIONS[one.name]}\n" for one in CONFIGURATIONS)]
    parts += ["\n## Totals\n\n", *(f"{line}\n" for line in _totals(known))]
    for library in catalogue.LIBRARIES:
        parts += [f"\n## {library.name}\n\n", *(f"{line}\n" for line in _library(library, found))]
    parts += [*(f"{line}\n" for line in _reasons(known))]
    return "".join(parts)


def _totals(lines: Sequence[Line]) -> Iterator[str]:
    registered = len(catalogue.programs())
    yield f"{registered} programs are registered; {'; '.join(summary(lines))}."
    yield ""
    yield "| configuration | " + " | ".join(OUTCOMES[:-1]) + " | coverage >= 90 % |"
    yield "| --- |" + " --- |" * len(OUTCOMES)
    for one in CONFIGURATIONS:
        own = [line for line in lines if line["configuration"] == one.name]
        if not own:
            continue
        counts = Counter(line["outcome"] for line in own)
        shares = [line["coverage"] for line in own if line.get("coverage") is not None]
        enough = sum(share >= ENOUGH for share in shares)
        cells = [str(counts[name]) for name in OUTCOMES[:-1]]
        yield f"| `{one.name}` | {' | '.join(cells)} | {enough} of {len(shares)} |"


def _library(library: Library, found: dict[tuple[str, str], Line]) -> Iterator[str]:
    if library.needs:
        yield f"Needs {', '.join(f'`{name}`' for name in library.needs)}."
        yield ""
    names = [one.name for one in CONFIGURATIONS]
    yield "| program | " + " | ".join(names) + " | error | noise | rounding | coverage | rewrite |"
    yield "| --- |" + " --- |" * (len(names) + 5)
    for program in library.programs:
        own = {name: found.get((program.name, name), {}) for name in names}
        cells = [_outcome(line) for line in own.values()]
        yield f"| [{program.name}]({_link(program)}) | {' | '.join(cells)} | {' | '.join(_figures(own))} |"


def _link(program: Program) -> str:
    return f"https://{program.source}"


def _outcome(line: Line) -> str:
    outcome = line.get("outcome", "")
    return f"**{outcome}**" if outcome in BAD else SHORT.get(outcome, outcome)


def _figures(own: dict[str, Line]) -> list[str]:
    exact = [line for line in own.values() if line.get("outcome") == "exact"]
    if not exact:
        return ["", "", "", "", ""]
    worst = max(exact, key=lambda line: line["error"])
    shares = [own[name]["coverage"] for name in ALL_REDUCE if own[name].get("coverage") is not None]
    seconds = max(line.get("rewrite_seconds", 0.0) for line in exact)
    over = max(line["over"] for line in exact)
    share = f"{100 * min(shares):.1f} %" if shares else ""
    return [f"{worst['error']:.0e}", f"{worst['noise']:.0e}", str(over or ""), share, f"{seconds:.1f}"]


def _reasons(lines: Sequence[Line]) -> Iterator[str]:
    for outcome in (*BAD, "refused", "broken", "not installed"):
        own = [line for line in lines if line["outcome"] == outcome]
        if not own:
            continue
        yield ""
        yield f"## {outcome.capitalize()}"
        yield ""
        reasons: dict[tuple[str, str], list[str]] = {}
        for line in own:
            reasons.setdefault((line["program"], _plain(line.get("reason", ""))), []).append(line["configuration"])
        for (program, reason), names in reasons.items():
            why = catalogue.programs()[program][1].why if outcome == "broken" else ""
            yield f"- {program} ({', '.join(names)}): {reason}{f' ({why})' if why else ''}"
    yield from _low(lines)


def _low(lines: Sequence[Line]) -> Iterator[str]:
    programs = catalogue.programs()
    low: dict[str, Line] = {}
    for line in lines:
        share = line.get("coverage")
        if share is not None and share < ENOUGH and line["configuration"] in ALL_REDUCE:
            low[line["program"]] = min(low.get(line["program"], line), line, key=lambda one: one["coverage"])
    if not low:
        return
    yield ""
    yield "## Coverage below 90 %"
    yield ""
    for name, line in sorted(low.items(), key=lambda pair: pair[1]["coverage"]):
        why = programs[name][1].why
        whole = "; ".join(_plain(text) for text in line.get("whole", ())[:2])
        yield f"- {name}, {100 * line['coverage']:.1f} %: {why + '. ' if why else ''}{whole}"


def _plain(text: str) -> str:
    """Return a text that a Markdown list can hold."""
    short = text if len(text) <= WIDTH else f"{text[:WIDTH]} ..."
    return short.replace("`", "'").replace("|", "/").replace("<", "(").replace(">", ")").replace("\n", " ")
