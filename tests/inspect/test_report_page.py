"""The page of a report in a browser: what opens, folds, is found and compared, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.diagnostics.amounts import duration, size
from autograph_rewrite.inspect.pass_states import GraphStates
from autograph_rewrite.inspect.profile import Profile
from autograph_rewrite.inspect.report import Reported, page, report_data
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types import dtypes
from tests.inspect.test_profile import rank
from tests.inspect.test_report import CONFIG, HOSTILE, hostile_graph
from tests.support.headless import CHROMIUM, driven
from tests.support.small_items import regression

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")

VIEWS = ("overview", "cost", "graph", "compare", "variables", "communication", "timeline", "memory")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ar.report(regression(), tmp_path_factory.mktemp("page") / "report.html", CONFIG)


def test_every_view_opens_and_no_request_leaves(report: Path) -> None:
    opened = "".join(f"Page.show('{view}'); R.{view} = document.getElementById('{view}').innerText;" for view in VIEWS)
    found = driven(report, f"{opened} R.requests = performance.getEntriesByType('resource').length;")
    assert found["requests"] == 0
    assert "predicted step" in found["overview"]
    assert "Not verified" in found["overview"]
    assert "Where the time goes" in found["cost"]
    assert "after expand" in found["graph"]
    assert "added" in found["compare"]
    assert "w/Momentum" in found["variables"] or "Momentum" in found["variables"]
    assert "CollectiveReduceV2" in found["communication"]
    assert "Predicted step" in found["timeline"]
    assert "variables and slots" in found["memory"]


def test_measured_lanes_stand_below_the_predicted_ones(tmp_path: Path) -> None:
    measured = Profile.of([rank(0), rank(1)])
    file = ar.report(regression(), tmp_path / "report.html", CONFIG, measured=measured)
    found = driven(file, "R.text = document.getElementById('timeline').innerText;", view="timeline")
    assert "Predicted step" in found["text"]
    assert "Measured step: 1 µs" in found["text"].replace("1.00", "1")
    assert "compute, predicted" in found["text"]
    assert "all_reduce dw" in found["text"]


def test_the_slider_goes_through_the_passes(report: Path) -> None:
    script = """
    const seen = index => { Page.pass(index); return document.getElementById('pass-name').innerText; };
    R.seen = Page.steps.map((step, index) => seen(index));
    R.nodes = Page.steps.map((step, index) => Page.state(index).ids.length);
    R.said = Page.steps.map(step => step.nodes);
    """
    found = driven(report, script, view="graph")
    assert (found["seen"][0], found["seen"][-1]) == ("original", "after expand")
    assert found["nodes"] == found["said"]


def test_a_node_is_found_and_told_about(report: Path) -> None:
    script = """
    const found = Page.search('all_reduce');
    R.names = found.map(id => Page.graph.state.names[id]);
    Page.go(found[0]);
    R.details = document.getElementById('details').innerText;
    Page.go(Page.search('gradient').find(id => Page.graph.state.names[id] === 'gradient'));
    R.gradient = document.getElementById('details').innerText;
    """
    found = driven(report, script, view="graph")
    assert "gradient/all_reduce" in found["names"]
    assert "CollectiveReduceV2" in found["details"]
    assert "pass lower-reshards" in found["details"]
    assert "partial(sum) → replicated by collective_reduce" in found["gradient"].replace("\n", " ")
    assert "for w" in found["gradient"]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    file = ar.report(ar.GraphItem(hostile_graph()), tmp_path / "hostile.html")
    script = """
    Page.show('compare'); Page.show('graph');
    for (const id of Page.state(0).ids) Page.go(id);
    R.found = Page.search('script').length;
    R.hacked = window.hacked === undefined ? 0 : 1;
    R.names = Page.state(0).ids.map(id => Page.state(0).names[id]);
    R.shown = [...Page.graph.boxes.keys()].filter(item => item.isLeaf).length;
    R.images = document.images.length;
    """
    found = driven(file, script, view="graph")
    assert (found["hacked"], found["images"], found["found"]) == (0, 0, 1)
    assert found["names"] == list(HOSTILE)
    assert found["shown"] == len(HOSTILE)


def test_what_differs_is_listed_and_told_about(report: Path) -> None:
    script = """
    const names = text => [...document.querySelectorAll('#changes ' + text)].map(one => one.textContent);
    R.headings = names('h3'); R.listed = names('li');
    const view = Page.after, now = view.state;
    const id = now.ids.find(one => now.names[one] === 'gradient/all_reduce');
    view.reveal(id);
    R.details = document.getElementById('changes').innerText;
    view.select(null);
    R.again = names('h3');
    """
    found = driven(report, script, view="compare")
    assert [heading.partition(" ")[2] for heading in found["headings"]] == ["added", "removed", "rewired"]
    assert "gradient/all_reduce" in found["listed"]
    assert "pass lower-reshards" in found["details"]
    assert found["again"] == found["headings"]


def test_an_address_leads_to_a_node_after_a_pass_and_every_look_has_one(report: Path) -> None:
    script = """
    R.pass = document.getElementById('pass-name').innerText;
    R.details = document.getElementById('details').innerText;
    Page.go(Page.search('loss').find(id => Page.graph.state.names[id] === 'loss'));
    R.node = location.hash;
    Page.show('memory');
    R.view = location.hash;
    """
    found = driven(report, script, view="graph/propagate/gradient")
    assert found["pass"] == "after propagate"
    assert "partial(sum)" in found["details"]
    assert (found["node"], found["view"]) == ("#graph/propagate/loss", "#memory")


def test_keys_choose_a_node_and_sort_a_table(report: Path) -> None:
    script = """
    const press = (element, key) => element.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
    const drawing = document.querySelector('#pane-graph .drawing');
    press(drawing, 'ArrowDown'); R.first = Page.graph.selected.label;
    press(drawing, 'ArrowDown'); R.second = Page.graph.selected.label;
    press(drawing, 'ArrowUp'); R.third = Page.graph.selected.label;
    press(drawing, 'Escape'); R.none = Page.graph.selected;
    Page.show('variables');
    const heading = document.querySelector('#variables th');
    press(heading, 'Enter'); R.sorted = heading.getAttribute('aria-sort');
    """
    found = driven(report, script, view="graph")
    assert found["first"] != found["second"]
    assert found["third"] == found["first"]
    assert (found["none"], found["sorted"]) == (None, "ascending")


def test_nothing_covers_the_graph_and_bookkeeping_waits_until_it_is_asked_for(report: Path) -> None:
    script = """
    const box = name => document.querySelector('#pane-graph ' + name).getBoundingClientRect();
    R.bottom = box('.drawing').bottom; R.legend = box('.legend').top; R.end = box('.legend').bottom;
    const shown = () => [...Page.graph.boxes.keys()].filter(item => item.label.startsWith('autograph_batch')).length;
    R.hidden = shown();
    document.getElementById('bookkeeping').click(); R.asked = shown();
    R.image = Page.graph.image();
    """
    found = driven(report, script, view="graph")
    assert found["bottom"] <= found["legend"] < found["end"] <= 900
    assert found["hidden"] == 0 < found["asked"]
    assert found["image"].startswith("<svg")


def test_panes_move_together(report: Path) -> None:
    script = "Page.before.zoom(2, 10, 10); R.before = Page.before.at; R.after = Page.after.at;"
    found = driven(report, script, view="compare")
    assert found["before"] == found["after"]


@pytest.mark.full
def test_bert_over_eight_replicas_is_looked_through_at_once(tmp_path: Path) -> None:
    from benchmarks import bert

    item = ar.GraphItem.from_graph(bert.build(12, tiny=True), **bert.NAMES)
    file = ar.report(item, tmp_path / "bert.html", bert.config(8))
    more = """
    R.slide = Page.steps.map((step, index) => took(() => Page.pass(index)));
    R.compare = took(() => Page.show('compare'));
    """
    found = driven(file, MEASURED + more, view="graph")
    assert file.stat().st_size < 10_000_000
    assert found["opened"] < 2000
    assert max(found["unfold"]) < 1000
    assert found["search"] < 300
    assert max(found["slide"]) < 1000
    assert found["compare"] < 2000


def layered(count: int, per_scope: int) -> Graph:
    """Return a chain of so many nodes, in scopes."""
    graph = Graph()
    value = graph.add("Placeholder", name="x", attrs={"dtype": dtypes.FLOAT, "shape": (None, 3)}).output()
    for index in range(count - 1):
        layer, rest = divmod(index, per_scope)
        value = graph.add(
            "Tanh", [value], name=f"block_{layer // 25}/layer_{layer}/part_{rest // 12}/op_{rest}"
        ).output()
    return graph


@pytest.mark.parametrize("per_scope", [60, 100_000], ids=["scopes", "flat"])
def test_a_hundred_thousand_nodes_open_and_fold_at_once(tmp_path: Path, per_scope: int) -> None:
    states = GraphStates()
    states.keep("graph", layered(100_000, per_scope))
    small = report_data(Reported(GraphStates(), regression()))
    large = {**small, "graph": states.data(), "step-0": states.steps[0].data()}
    file = tmp_path / "large.html"
    file.write_text(page("large", large), encoding="utf-8")
    found: dict[str, Any] = driven(file, MEASURED, view="graph")
    assert found["opened"] < 2000
    assert max(found["unfold"]) < 1500
    assert found["search"] < 300
    assert found["drawn"] < 1000


MEASURED = """
R.opened = performance.now();
const took = work => { const began = performance.now(); work(); return performance.now() - began; };
R.search = took(() => { R.hits = Page.search('op_17').length; });
const view = Page.graph;
R.unfold = [];
for (let i = 0; i < 3; i++) {
  const closed = [...view.boxes.keys()].filter(item => !item.isLeaf && !view.layout.isOpen(item));
  if (closed.length) R.unfold.push(took(() => view.toggle(closed[Math.floor(closed.length / 2)])));
}
R.reveal = took(() => Page.go(Page.state(Page.steps.length - 1).ids.slice(-1)[0]));
R.drawn = view.boxes.size;
"""


def test_the_page_writes_amounts_as_python_does(report: Path) -> None:
    sizes = [0, 1, 4, 1536, 2**20, 343_441_420, 3 * 2**40]
    times = [0.0, 2e-7, 4.35e-5, 0.0435, 1.0, 47.61, 190.2]
    script = f"R.sizes = {sizes}.map(bytes); R.times = {times}.map(seconds);"
    found = driven(report, script)
    assert found["sizes"] == [size(count) for count in sizes]
    assert found["times"] == [duration(one) for one in times]
