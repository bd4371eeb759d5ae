"""What a notebook shows: tables of what an object holds, in which a stranger's names are inert."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest

import autograph_rewrite as ar
from autograph_rewrite.check.bisect import Bisection
from autograph_rewrite.check.reduce import Reduction
from autograph_rewrite.check.report import ComparedTensor, VerifyReport
from autograph_rewrite.notebook import MOST, NotebookView, table
from tests.support.small_items import regression

HOSTILE = "<script>alert(1)</script>&\"'"


NAMES = ("item", "plan", "report", "verify", "diff", "bisect", "reduce", "simulate")


@cache
def views() -> dict[str, NotebookView]:
    item = regression()
    new = ar.rewrite(item, "all_reduce_mirrored")
    renamed = replace(item, inputs={HOSTILE: replace(item.inputs["x"], name=HOSTILE)})
    plan = new.report.plan
    row = ComparedTensor(HOSTILE, "variable", 0.5, 1.0, "step 1", ok=False)
    config = {"strategy": HOSTILE, "mode": "shared", "devices": ["CPU:0"]}
    return {
        "item": renamed,
        "plan": replace(plan, strategy=HOSTILE, notes=(HOSTILE,)),
        "report": replace(new.report, plan=replace(plan, notes=(HOSTILE,))),
        "verify": VerifyReport(False, 0.5, (row,), config, 3, 5, 1e-5, (HOSTILE,), 0.1, advice=(HOSTILE,)),
        "diff": replace(ar.diff(item, new), added={HOSTILE: HOSTILE}),
        "bisect": Bisection(False, HOSTILE, HOSTILE),
        "reduce": Reduction(item, HOSTILE, 18, 3),
        "simulate": replace(ar.simulate(item, plan), notes=(HOSTILE,)),
    }


class Tags(HTMLParser):
    """Collects the tags of a text and what stands between them; complains about what is left open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", NAMES)
def test_names_are_inert_and_every_element_ends(name: str) -> None:
    found = Tags()
    found.feed(views()[name]._repr_html_())
    assert not found.open
    assert found.seen <= {"div", "p", "b", "pre", "table", "thead", "tbody", "tr", "th", "td"}
    assert HOSTILE in found.text


@pytest.mark.parametrize("name", NAMES)
def test_a_repr_is_one_line_that_names_the_class(name: str) -> None:
    view = views()[name]
    assert repr(view).startswith(f"<{type(view).__name__} ")
    assert "\n" not in repr(view)


def test_texts_and_pages_are_shown_as_they_are() -> None:
    config = ar.Config.of("all_reduce_mirrored")
    assert "mirrored" in config._repr_html_()
    assert ar.explain(regression(), config)._repr_html_().startswith("<pre>The graph of")
    assert ar.dump(regression())._repr_html_().startswith("<pre>")


def test_a_long_table_counts_the_rows_that_it_leaves_out() -> None:
    shown = table(("#n",), [(i,) for i in range(MOST + 7)])
    assert shown.count("<td") == MOST
    assert "... and 7 more" in shown
