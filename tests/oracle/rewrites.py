"""One rewrite of a stored item, and what of it is compared: digests of graph, plan and printed forms, or a refusal."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.oracle import printed
from tests.oracle.graphs import MADE, PROVENANCE, exact, lines, modulo_names, plan_modulo_names, read

TOGETHER = 8
"""Rewrites of one item that a process does before it takes others: few enough for the last ones to be shared."""
FINAL = "the last pass"
"""What the form of the finished graph is called; observers do not see the last pass."""


@dataclass(frozen=True)
class Case:
    """A rewrite: a configuration of an item, for one of the ranks of its job."""

    item: str
    config: str
    rank: int
    settings: Mapping[str, Any] = field(compare=False)
    is_job: bool = field(default=False, compare=False)
    is_printed: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        """Its name."""
        return f"{self.item} {self.config}" + (f" rank {self.rank}" if self.is_job else "")


@dataclass(frozen=True)
class Outcome:
    """What a rewrite gives.

    Attributes:
        graph: the digest of the graph.
        structure: the same modulo the names of nodes that passes have added.
        plan: the digest of the plan.
        wording: the same modulo these names.
        forms: of a printed case, the name of each pass and the digest of the graph's text after it.
        refusal: the error's type and first line; then there is no digest.
    """

    graph: str = ""
    structure: str = ""
    plan: str = ""
    wording: str = ""
    forms: tuple[tuple[str, str], ...] = ()
    refusal: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Outcome:
        """Read it again from what `asdict` and JSON made of it."""
        return cls(**{**data, "forms": tuple((name, digest) for name, digest in data.get("forms", ()))})


@dataclass
class Texts:
    """The printed forms of a rewrite in the order of its passes, its plan, and all that its encoded graph says."""

    forms: list[tuple[str, str]] = field(default_factory=list)
    plan: str = ""
    encoded: str = ""

    @classmethod
    def read(cls, folder: Path, case: Case) -> Texts:
        """Read what `outcomes` wrote of a case; nothing of one that was refused at once."""
        data = json.loads((folder / f"{case}.json").read_text())
        return cls([(name, text) for name, text in data["forms"]], data["plan"], data["encoded"])


def outcome(folder: Path, case: Case, ignored: Collection[str] = PROVENANCE, texts: Texts | None = None) -> Outcome:
    """Rewrite an item and digest what comes out; its texts are kept where somebody asks for them."""
    import autograph_rewrite as ar

    added: set[str] = set()
    kept = Texts() if texts is None else texts
    is_printed = case.is_printed or texts is not None
    watch = [partial(_collect, added), *([printed.observer(kept.forms)] if is_printed else [])]
    rank = case.rank if case.is_job else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            new = ar.rewrite(_item(folder / f"{case.item}.ar"), dict(case.settings), task=rank, observers=watch)
    except Exception as error:  # a RewriteError refuses; anything else is a defect, and no reason to stop either
        first, _, more = str(error).partition("\n")
        told = f"{first} {more.strip()}".partition("\n")[0] if first.endswith(":") else first  # "... 2 problems:"
        return Outcome(refusal=f"{type(error).__name__}: {told}")
    kept.plan = new.report.plan.to_yaml()
    if is_printed:
        kept.forms.append((FINAL, printed.plain(ar.dump(new))))
    graph = read(new.graph_bytes, ignored)
    if texts is not None:
        texts.encoded = lines(graph)
    return Outcome(
        graph=exact(graph),
        structure=modulo_names(graph),
        plan=_digest(kept.plan),
        wording=plan_modulo_names(kept.plan, added),
        forms=tuple((name, _digest(text, 6)) for name, text in kept.forms) if case.is_printed else (),
    )


def outcomes(
    folder: Path, cases: Sequence[Case], jobs: int, ignored: Collection[str] = PROVENANCE, texts: Path | None = None
) -> Iterator[tuple[Case, Outcome]]:
    """Rewrite all cases in `jobs` processes, in no certain order.

    Texts go to a folder, as `NAME OF THE CASE.json`.
    """
    with ProcessPoolExecutor(jobs) as pool:
        work = [pool.submit(_some, folder, part, ignored, texts) for part in _parts(folder, cases)]
        for done in as_completed(work):
            yield from done.result()


def _some(
    folder: Path, cases: Sequence[Case], ignored: Collection[str], texts: Path | None
) -> list[tuple[Case, Outcome]]:
    found = []
    for case in cases:
        kept = None if texts is None else Texts()
        found.append((case, outcome(folder, case, ignored, kept)))
        if texts is not None and kept is not None:
            (texts / f"{case}.json").write_text(json.dumps(asdict(kept)))
    gc.collect()  # rewriting holds it off, and graphs are circles
    return found


def _parts(folder: Path, cases: Sequence[Case]) -> list[Sequence[Case]]:
    """Cases of one item together, those of the largest item first: they take longest, and should not be the last."""
    size = {name: (folder / f"{name}.ar").stat().st_size for name in {case.item for case in cases}}
    ordered = sorted(cases, key=lambda case: (-size[case.item], case.item))
    groups = [list(group) for _, group in groupby(ordered, key=lambda case: case.item)]
    return [group[i : i + TOGETHER] for group in groups for i in range(0, len(group), TOGETHER)]


@lru_cache(maxsize=2)
def _item(file: Path) -> Any:
    import autograph_rewrite as ar

    return ar.GraphItem.load(file)


def _collect(added: set[str], name: str, graph: Any) -> None:
    added.update(node.name for node in graph if MADE in node.attrs)


def _digest(text: str, size: int = 12) -> str:
    return blake2b(text.encode(), digest_size=size).hexdigest()
