"""What the digests see and what they are blind to, and what is said of a difference; without TensorFlow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle import graphs, recording
from tests.oracle.differences import Place, by_turns, first_line, first_node, first_place, kinds, only_names, report
from tests.oracle.graphs import Encoded, Node, exact, modulo_names, plan_modulo_names
from tests.oracle.recording import Recording
from tests.oracle.rewrites import Case, Outcome, Texts


def string(text: str) -> bytes:
    return b"\x12" + bytes([len(text)]) + text.encode()


def node(name: str, op: str, *inputs: str, added: bool = True, **attrs: bytes) -> Node:
    return Node(name, op, inputs, "/device:CPU:0", attrs, added)


GRAPH = Encoded(
    (
        node("x", "Placeholder", added=False),
        node("x/one", "Const", value=b"1"),
        node("x/two", "Const", value=b"2"),
        node("x/sum", "AddV2", "x/one", "x/two"),
        node("y", "Mul", "x", "x/sum", "^x/two", "^x/one", added=False),
        node("y/copy", "Identity", "y", _class=b"\x0a\x09" + string("loc:@y/copy"[:7])),
        node("y/state", "VarHandleOp", shared_name=string("y/state")),
        node("enter", "Enter", "y"),
        node("merge", "Merge", "enter", "next"),
        node("next", "NextIteration", "merge:0"),
    )
)


def renamed(graph: Encoded, names: Mapping[str, str]) -> Encoded:
    def new(text: str) -> str:
        begin = "^" if text.startswith("^") else ""
        name, colon, port = text.removeprefix("^").partition(":")
        return begin + names.get(name, name) + colon + port

    return Encoded(
        tuple(
            replace(
                one,
                name=new(one.name),
                inputs=tuple(map(new, one.inputs)),
                attrs={k: string(new(one.name)) if k == "shared_name" else v for k, v in one.attrs.items()},
            )
            for one in graph.nodes
        )
    )


def changed(name: str, **changes: object) -> Encoded:
    return Encoded(tuple(replace(one, **changes) if one.name == name else one for one in GRAPH.nodes))  # type: ignore[arg-type]


def test_another_name_of_a_node_that_a_pass_has_added_changes_only_the_exact_digest() -> None:
    new = renamed(GRAPH, {"x/one": "z", "x/sum": "a", "y/state": "b", "merge": "c", "next": "d"})
    assert exact(new) != exact(GRAPH)
    assert modulo_names(new) == modulo_names(GRAPH)


def test_another_name_of_a_node_of_the_original_changes_both_digests() -> None:
    assert modulo_names(renamed(GRAPH, {"y": "z"})) != modulo_names(GRAPH)


def test_the_order_of_nodes_and_of_control_edges_has_no_meaning() -> None:
    new = Encoded(tuple(reversed(changed("y", inputs=("x", "x/sum", "^x/one", "^x/two")).nodes)))
    assert exact(new) != exact(GRAPH)
    assert modulo_names(new) == modulo_names(GRAPH)


@pytest.mark.parametrize(
    "new",
    [
        changed("x/one", attrs={"value": b"3"}),
        changed("x/sum", op="Sub"),
        changed("x/sum", device="/device:CPU:1"),
        changed("x/sum", inputs=("x/two", "x/one")),
        changed("x/sum", inputs=("x/one", "x/one")),
        changed("y", inputs=("x", "x/sum", "^x/two")),
        changed("next", inputs=("merge:1",)),
        changed("y/state", attrs={"shared_name": string("other")}),
        Encoded((*GRAPH.nodes, node("x/one_more", "Const", value=b"1"))),
        Encoded(GRAPH.nodes, b"library"),
    ],
)
def test_a_changed_attribute_input_or_node_changes_both_digests(new: Encoded) -> None:
    assert exact(new) != exact(GRAPH)
    assert modulo_names(new) != modulo_names(GRAPH)


def test_it_is_seen_whether_two_readers_share_a_node_or_have_equal_ones() -> None:
    def read_by(*readers: tuple[str, str]) -> Encoded:
        twins = (node("a", "RandomUniform"), node("b", "RandomUniform"))
        return Encoded((*twins, *(node(f"{op}/of", op, source) for op, source in readers)))

    assert modulo_names(read_by(("Neg", "a"), ("Abs", "a"))) == modulo_names(read_by(("Neg", "b"), ("Abs", "b")))
    assert modulo_names(read_by(("Neg", "a"), ("Abs", "a"))) != modulo_names(read_by(("Neg", "a"), ("Abs", "b")))


def test_an_encoded_graph_is_read_without_what_is_ignored() -> None:
    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    def attr(key: str, value: bytes) -> bytes:
        return field(5, field(1, key.encode()) + field(2, value))

    made = attr("_autograph_pass", string("expand")) + attr("T", b"0\x01") + field(6, b"debug")
    data = field(1, field(1, b"a") + field(2, b"Neg") + field(3, b"b") + made) + field(4, b"versions")
    found = graphs.read(data)
    (only,) = found.nodes
    assert (only.name, only.op, only.inputs, only.attrs, only.is_added) == ("a", "Neg", ("b",), {"T": b"0\x01"}, True)
    assert only.rest == field(6, b"debug")
    assert found.rest == field(4, b"versions")


def test_a_plan_is_compared_up_to_the_names_of_added_nodes() -> None:
    one = plan_modulo_names("edges:\n- value: Mean/count:1\n  reason: Mul 'y' reads it\n", {"Mean/count"})
    other = plan_modulo_names("edges:\n- value: Mean/number:1\n  reason: Mul 'y'\n    reads it\n", {"Mean/number"})
    assert (
        one == other != plan_modulo_names("edges:\n- value: Mean/count:1\n  reason: Mul 'z' reads it\n", {"Mean/count"})
    )


CASE = Case("mlp", "shared2", 0, {})
OLD = Outcome("g", "s", "p", "w", (("propagate", "1"), ("insert-reshards", "2")))


def test_a_report_names_the_case_the_kind_the_pass_and_the_lines() -> None:
    new = replace(OLD, graph="h", forms=(("propagate", "1"), ("insert-reshards", "3")))
    old_texts = Texts([("propagate", "%a\n"), ("insert-reshards", "%a\n%b = Add(%a)\n")])
    new_texts = Texts([("propagate", "%a\n"), ("insert-reshards", "%a\n%c = Add(%a)\n")])
    place = first_place(old_texts, new_texts)
    assert list(report({CASE: OLD}, {CASE: new}, {CASE: place})) == [
        "mlp shared2: graph differs exactly, equal modulo names; printed form differs after insert-reshards",
        "    after insert-reshards:\n      - %b = Add(%a)\n      + %c = Add(%a)",
    ]
    assert only_names(OLD, new)
    assert not only_names(OLD, replace(new, structure="t"))
    assert kinds(OLD, replace(new, structure="t", forms=OLD.forms)) == ["graph differs also modulo names"]
    assert kinds(OLD, Outcome(refusal="PlanError: no")) == ["was not refused, now is refused (PlanError: no)"]


def test_passes_that_only_one_side_has_are_no_difference() -> None:
    assert not kinds(OLD, replace(OLD, forms=(("begin", "0"), ("insert-reshards", "2"))))


def test_a_plan_or_an_attribute_that_is_not_printed_is_named_too() -> None:
    assert first_place(Texts([], "a: 1"), Texts([], "a: 2")) == Place("plan", "a: 1", "a: 2")
    assert first_place(Texts([], "", "x _a=1"), Texts([], "", "x _a=2")) == Place("encoded graph", "x _a=1", "x _a=2")
    assert first_place(Texts(), Texts()) is None


def test_a_line_that_was_only_put_in_or_left_out_stands_alone() -> None:
    assert first_line("a\nc", "a\nb\nc") == ("", "b")
    assert first_line("a\nb\nc", "a\nc") == ("b", "")
    assert first_line("a\nb", "b\na") == ("a", "b")
    assert first_line("a", "a\nb") == ("", "b")


def test_of_a_graph_the_first_node_that_differs_is_shown_wherever_others_have_moved() -> None:
    assert first_node("%a = A\n%b = B\n%c = C", "%b = B\n%a = A\n%c: split = C") == ("%c = C", "%c: split = C")
    assert first_node("%a = A\n%c = C(%a)", "%a = A\n%b = B\n%c = C(%b)") == ("", "%b = B")
    assert first_node("%a = A\n%b = B\n%c = C(%b)", "%a = A\n%c = C(%a)") == ("%b = B", "")
    assert first_node("%a = A\n%b = B", "%a = A\n%z = B") == ("%b = B", "%z = B")
    assert first_node("%a = A\n%b = B", "%b = B\n%a = A") == ("%a = A", "%b = B")


def test_the_first_cases_shown_are_of_as_many_items_as_there_are() -> None:
    cases = [Case(item, config, 0, {}) for item in ("a", "b") for config in ("one", "two")]
    assert [str(case) for case in by_turns(cases)] == ["a one", "b one", "a two", "b two"]


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    kept = Recording("c0ffee", {CASE: OLD, replace(CASE, rank=1, is_job=True): Outcome(refusal="PlanError: no")})
    (tmp_path / "mlp.ar").write_bytes(b"item")
    for name in ("one", "two"):
        recording.write(kept, tmp_path, tmp_path / name)
    (tmp_path / "mlp.ar").unlink()
    assert recording.read(tmp_path / "one", tmp_path) == kept
    assert (tmp_path / "mlp.ar").read_bytes() == b"item"
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_every_recorded_configuration_is_accepted_for_some_item(tmp_path: Path) -> None:
    accepted: dict[str, bool] = defaultdict(bool)
    outcomes = recording.read(recording.FILE, tmp_path).outcomes
    for case, outcome in outcomes.items():
        accepted[case.config] |= not outcome.refusal
    assert {config for config, is_accepted in accepted.items() if not is_accepted} == ALWAYS_REFUSED
    assert sum(bool(outcome.forms) for outcome in outcomes.values()) >= 40


ALWAYS_REFUSED = {"micro_loop_fsdp", "stages_1x2x2_loop"}
"""Configurations whose refusal is what is recorded."""
