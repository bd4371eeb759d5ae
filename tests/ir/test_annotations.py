"""What is stated of values in a text comes back as it was written, and what cannot be read is found where it stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograph_rewrite import GraphError
from autograph_rewrite.ir import mesh
from autograph_rewrite.ir.format import annotations
from autograph_rewrite.ir.format.annotations import Annotation, Annotations, read_annotation
from autograph_rewrite.ir.format.parser import parse, read
from autograph_rewrite.ir.format.printer import render
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import EACH, ONCE, PER_REPLICA, REPLICA
from autograph_rewrite.ir.types.placement import REPLICATED, Placement, split
from tests.ir.test_random_edits import graphs

PLACEMENTS = st.one_of(
    st.sampled_from(list(annotations.PLAIN.values())),
    st.integers(0, 9).map(split),
    st.sampled_from(annotations.COMBINED_BY).map(lambda op: Placement("partial", op=op)),
)
AXES = [axis for axis in mesh.AXES if axis != REPLICA] + ["model_0", "model_11"]
OTHERS = st.dictionaries(st.sampled_from(AXES), PLACEMENTS.filter(lambda one: one != REPLICATED)).map(
    lambda found: tuple(found.items())
)
SPANS = st.sampled_from((ONCE, PER_REPLICA, EACH)) | st.frozensets(st.sampled_from([*AXES, REPLICA]), min_size=1)


@st.composite
def annotation(draw: st.DrawFn) -> Annotation:
    """Draw an annotation; what is not converted along one axis is converted along none."""
    readers = draw(st.none() | PLACEMENTS)
    seen = draw(OTHERS) if readers is not None else ()
    return Annotation(draw(PLACEMENTS), readers, draw(st.none() | SPANS), others=draw(OTHERS), readers_others=seen)


ANNOTATIONS = annotation()


@st.composite
def annotated(draw: st.DrawFn) -> tuple[Graph, Annotations]:
    """Draw a graph, and annotations of some of its values."""
    graph = draw(graphs())
    values = [node.output(i).name for node in graph for i in range(len(node.output_dtypes))]
    chosen = draw(st.lists(st.sampled_from(values), unique=True)) if values else []
    return graph, {name: draw(ANNOTATIONS) for name in chosen}


@given(ANNOTATIONS)
def test_an_annotation_is_read_as_it_was_written(stated: Annotation) -> None:
    assert read_annotation(str(stated)) == (stated, len(str(stated)))


@given(annotated())
def test_the_full_form_gives_every_placement_again(drawn: tuple[Graph, Annotations]) -> None:
    graph, stated = drawn
    graph = parse(render(graph, full=True))  # which fills attributes in that operands decide
    full = render(graph, full=True, placements=stated)
    again = read(full)
    assert again.placements == stated
    assert render(again.graph, full=True, placements=again.placements) == full


@given(annotated())
def test_the_short_form_leaves_out_what_every_replica_has(drawn: tuple[Graph, Annotations]) -> None:
    graph, stated = drawn
    again = read(render(graph, full=True))  # without provenance, which is a comment of the short form
    short = render(again.graph, placements=stated)
    told = read(render(graph, placements=stated).replace("  #", " #")).placements
    assert told == {name: one for name, one in stated.items() if not one.is_plain}
    assert render(again.graph, placements=told) == short


def test_each_result_of_a_node_has_a_placement_of_its_own() -> None:
    text = "%parts: (float32[?,2] @ split(0), float32, float32 @ partial(max) -> replicated each) = Split(%at, %x)\n"
    found = read(f"%at: int32 = Const() {{value=0}}\n%x: float32 @split( 1 ) = Placeholder()\n{text}", name="case.txt")
    assert {name: str(one) for name, one in found.placements.items()} == {
        "x": "split(1)",
        "parts": "split(0)",
        "parts:2": "partial(max) -> replicated each",
    }
    assert found.placements["parts"].where == "case.txt:3"
    assert text in render(found.graph, placements=found.placements)


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("{replica: split(0), model: split(1)}", None),
        ("{ replica:split( 0 ),model:split(1) }", "{replica: split(0), model: split(1)}"),
        ("{model_1: partial(sum), replica: split(0)}", "{replica: split(0), model_1: partial(sum)}"),
        ("{replica: split(0)}", "split(0)"),
        ("{model: replicated}", "replicated"),
        ("{replica: replicated, stage: split(2)}", "{stage: split(2)}"),
        ("{model: partial(sum)} -> replicated", None),
        ("split(0) -> {replica: split(0), model: split(1)} {micro, model}", None),
        ("split(0) {replica, micro}", "split(0) each"),
        ("split(0) {replica}", "split(0) replica"),
    ],
)
def test_placements_are_stated_by_axis(written: str, printed: str | None) -> None:
    found, at = read_annotation(written)
    assert at == len(written)
    assert str(found) == (printed or written)


def test_the_span_of_an_annotation_is_not_that_of_a_node() -> None:
    found = read("%a: float32 @ local each = Placeholder()\n%b: float32 @ local = Placeholder() each")
    assert [node.span for node in found.graph] == [ONCE, EACH]
    assert [one.span for one in found.placements.values()] == [EACH, None]


@pytest.mark.parametrize(
    ("stated", "column", "problem", "hint"),
    [
        ("splt(0)", 17, "'splt(0)' is no placement", "did you mean 'split(0)'?"),
        ("split", 17, "'split' is no placement", "did you mean 'split(0)'?"),
        ("split(x)", 23, "'x' is no dimension", "count dimensions from 0: split(0)"),
        ("split(-1)", 23, "'-1' is no dimension", "count dimensions from 0"),
        ("partial", 17, "'partial' is no placement", "did you mean 'partial(sum)'?"),
        ("partial(summ)", 25, "'summ' combines no contributions", "did you mean 'sum'?"),
        ("partial(frob)", 25, "'frob' combines no contributions", "write one of: sum, max"),
        ("replicatd", 17, "'replicatd' is no placement", "did you mean 'replicated'?"),
        ("replicated(0)", 17, "'replicated(0)' is no placement", "did you mean 'replicated'?"),
        ("", 16, "a placement is missing here", "write one of: replicated, split(0)"),
        ("sharded", 17, "'sharded' is no placement", ""),
        ("local -> ", 25, "a placement is missing here", ""),
        ("local -> everywhere", 26, "'everywhere' is no placement", "write one of"),
        ("partial(sum) eech", 30, "'eech' says no number of instances", "did you mean 'each'?"),
        ("{}", 18, "an axis is missing here", "write one of: replica, micro, model"),
        ("{modle: split(0)}", 18, "'modle' is no axis of a mesh", "did you mean 'model'?"),
        ("{model split(0)}", 24, "':' is missing here", "write {replica: split(0), model: split(1)}"),
        ("{model: split(0)", 33, "', or }' is missing here", ""),
        ("{model: splt(0)}", 25, "'splt(0)' is no placement", "did you mean 'split(0)'?"),
        ("{model: split(0), model: local}", 35, "the axis 'model' is named twice", "give it one placement"),
        ("{model: split(0)} -> {stag: local}", 39, "'stag' is no axis of a mesh", "did you mean 'stage'?"),
        ("local {model, replicas}", 31, "'replicas' is no axis of a mesh", "did you mean 'replica'?"),
        ("split(0) each once", 31, "'once' is not understood after a type", ""),
        ("split(0)]", 25, "']' is not understood after a type", ""),
    ],
)
def test_a_wrong_word_is_found_in_its_line_and_column(stated: str, column: int, problem: str, hint: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse(f"%fine = NoOp()\n  %a: float32 @ {stated} = Placeholder()", name="case.txt")
    assert caught.value.problem == problem
    assert caught.value.where == f"case.txt:2:{column}"
    assert hint in (caught.value.hint or "")


def test_a_value_that_no_node_makes_has_no_placement() -> None:
    with pytest.raises(GraphError, match="'a' has 1 result, so nothing can be stated of another") as caught:
        parse("%a: (float32, float32 @ local) = Placeholder()", name="case.txt")
    assert caught.value.where == "case.txt:1"
