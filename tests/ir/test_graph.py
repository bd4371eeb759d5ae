"""The edit verbs keep both ends of every edge, and refuse what would break one."""

from __future__ import annotations

import time

import pytest

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Graph, Node, Value, clone_into
from autograph_rewrite.ir.mesh import EACH, PerInstance, Select
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.types import dtypes

FLOAT, INT32, INT64, RESOURCE = dtypes.FLOAT, dtypes.INT32, dtypes.INT64, dtypes.RESOURCE


def const(graph: Graph, name: str = "c", value: object = 1.0, dtype: int = FLOAT) -> Value:
    import numpy as np

    array = np.asarray(value, dtype=dtypes.numpy_dtype(dtype))
    return graph.add("Const", name=name, attrs={"value": array, "dtype": dtype}).output()


def chain() -> tuple[Graph, Value, Value, Node]:
    """Return `a -> b = Neg(a)`, and `c = Add(a, b)`."""
    graph = Graph()
    a = const(graph, "a")
    b = graph.add("Neg", [a], name="b").output()
    return graph, a, b, graph.add("AddV2", [a, b], name="c")


def test_uses_mirror_inputs_after_every_verb() -> None:
    graph, a, b, c = chain()
    assert list(a.uses) == [(b.node, 0), (c, 0)]
    c.set_input(0, b)
    assert list(a.uses) == [(b.node, 0)]
    assert list(b.uses) == [(c, 1), (c, 0)]
    c.set_inputs([a, a])
    assert list(b.uses) == []
    assert list(a.uses) == [(b.node, 0), (c, 0), (c, 1)]
    graph.erase(c)
    assert list(a.uses) == [(b.node, 0)]


def test_inputs_given_as_a_generator_over_the_old_ones_are_kept() -> None:
    _, a, b, c = chain()
    c.set_inputs(v for v in reversed(c.inputs))
    assert c.inputs == (b, a)
    assert set(a.uses) == {(b.node, 0), (c, 1)}


def test_inputs_that_fail_to_compute_change_nothing() -> None:
    _, a, b, c = chain()

    def failing() -> object:
        yield b
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        c.set_inputs(failing())  # type: ignore[arg-type]
    assert c.inputs == (a, b)
    assert (c, 0) in a.uses


@pytest.mark.parametrize("index", [-1, 2, 7])
def test_an_input_that_does_not_exist_cannot_be_set(index: int) -> None:
    _, a, b, c = chain()
    with pytest.raises(GraphError, match=f"no input {index}"):
        c.set_input(index, a)
    assert c.inputs == (a, b)
    assert set(b.uses) == {(c, 1)}


def test_replacing_all_uses_leaves_no_use() -> None:
    graph, a, b, c = chain()
    graph.anchors["loss"] = a
    new = const(graph, "new")
    a.replace_all_uses_with(new)
    assert a.uses == ()
    assert set(new.uses) == {(b.node, 0), (c, 0)}
    assert graph.anchors["loss"] is new


def test_replacing_all_uses_keeps_the_nodes_that_it_is_told_to_keep() -> None:
    graph, a, b, c = chain()
    new = const(graph, "new")
    a.replace_all_uses_with(new, keep={c})
    assert a.uses == ((c, 0),)
    assert new.uses == ((b.node, 0),)


def test_replacing_a_value_by_itself_changes_nothing() -> None:
    _, a, b, c = chain()
    a.replace_all_uses_with(a)
    assert set(a.uses) == {(b.node, 0), (c, 0)}


def test_a_selector_survives_when_the_new_value_still_runs_on_each_replica() -> None:
    graph = Graph()
    x = graph.add("Const", name="x", attrs={"value": 1.0, "dtype": FLOAT}, span=EACH).output()
    merged = graph.add("AddN", [x], name="sum", attrs={"N": 2}, selects={0: Select.ALL})
    fenced = graph.add("Identity", [x], name="fence", span=EACH).output()
    x.replace_all_uses_with(fenced, keep={fenced.node})
    assert merged.inputs == (fenced,)
    assert fenced.node.span == EACH
    assert merged.selects == {0: Select.ALL}
    fenced.replace_all_uses_with(const(graph, "once"))
    assert merged.selects == {}, "a value that runs once needs no selector"


def test_anchors_move_with_the_node_that_replaces_theirs() -> None:
    graph, a, b, c = chain()
    graph.anchors["loss"] = b
    waiter = graph.add("NoOp", name="waiter", controls=[b.node])
    abs_b = graph.add("Abs", [a], name="abs")
    graph.replace(b.node, abs_b)
    assert graph.anchors["loss"] is abs_b.output()
    assert waiter.controls == (abs_b,)
    assert c.inputs == (a, abs_b.output())
    assert "b" not in graph


def test_a_replacement_that_reads_what_it_replaces_is_refused_before_any_edit() -> None:
    graph, a, b, c = chain()
    wrapper = graph.add("Identity", [b], name="wrapper")
    with pytest.raises(GraphError, match="'wrapper' reads"):
        graph.replace(b.node, wrapper)
    assert c.inputs == (a, b)
    assert "b" in graph


def test_erase_refuses_while_a_reader_a_waiter_or_an_outside_name_is_left() -> None:
    graph, a, b, c = chain()
    with pytest.raises(GraphError, match="still read by b, c") as caught:
        graph.erase(a.node)
    assert "replace_all_uses_with" in str(caught.value)
    waiter = graph.add("NoOp", name="waiter", controls=[c])
    with pytest.raises(GraphError, match="waiter"):
        graph.erase(c)
    graph.erase(waiter)
    graph.anchors["loss"] = c.output()
    with pytest.raises(GraphError, match="outside name loss"):
        graph.erase(c)
    del graph.anchors["loss"]
    graph.erase(c)
    graph.erase(b.node)
    graph.erase(a.node)
    assert len(graph) == 0


def test_erase_gives_up_both_ends_of_control_edges() -> None:
    graph, _, b, c = chain()
    c.add_control(b.node)
    graph.erase(c)
    assert b.node.control_users == ()


def test_a_node_cannot_be_erased_twice() -> None:
    graph, *_, c = chain()
    graph.erase(c)
    with pytest.raises(GraphError, match="no node 'c'"):
        graph.erase(c)


def test_control_edges_are_kept_at_both_ends_and_once() -> None:
    graph, a, _, c = chain()
    c.add_control(a.node)
    edits = graph.edits
    c.add_control(a.node)
    assert graph.edits == edits
    assert list(c.controls) == [a.node]
    assert list(a.node.control_users) == [c]
    c.remove_control(a.node)
    assert list(a.node.control_users) == []


def test_every_edit_is_counted_and_a_no_op_is_not() -> None:
    graph, a, _, c = chain()
    for edit in (
        lambda: c.set_input(0, a),
        lambda: c.set_device("/device:CPU:1"),
        lambda: c.set_attr("_note", "x"),
        lambda: c.drop_attr("_note"),
        lambda: c.add_control(a.node),
        lambda: c.remove_control(a.node),
        lambda: const(graph, "more"),
    ):
        before = graph.edits
        edit()
        assert graph.edits > before
    before = graph.edits
    c.set_device("/device:CPU:1")
    c.drop_attr("_note")
    c.remove_control(a.node)
    assert graph.edits == before


class _Watched(dict[str, Node]):
    """Records which names were looked for."""

    def __init__(self, nodes: dict[str, Node], tried: list[str]) -> None:
        super().__init__(nodes)
        self._tried = tried

    def __contains__(self, name: object) -> bool:
        self._tried.append(str(name))
        return super().__contains__(name)


def test_names_are_made_unique_without_trying_taken_ones_again() -> None:
    graph = Graph()
    names = [const(graph, "x").node.name for _ in range(3)]
    assert names == ["x", "x_1", "x_2"]
    const(graph, "y_1")
    assert const(graph, "y").node.name == "y"
    assert const(graph, "y").node.name == "y_2"
    tried: list[str] = []
    graph.nodes = _Watched(graph.nodes, tried)
    for _ in range(50):
        const(graph, "x")
    assert tried.count("x_7") <= 2


@pytest.mark.parametrize(
    ("wanted", "name"), [("up:0/mean", "up_0/mean"), ("a b%ö", "a_b__"), ("_w", "._w"), (".x>1", ".x>1")]
)
def test_a_node_gets_a_name_that_tensorflow_takes_whatever_its_variable_is_called(wanted: str, name: str) -> None:
    graph = Graph()
    assert graph.add("NoOp", name=wanted).name == name
    assert graph.add("NoOp", name=wanted).name == f"{name}_1"


def test_inserting_a_taken_name_is_refused() -> None:
    graph, a, *_ = chain()
    with pytest.raises(GraphError, match="two nodes are named 'a'"):
        graph.insert(Node(graph, "a", "NoOp", "", {}, b""))
    assert graph.node("a") is a.node


def test_clone_into_another_graph_under_a_prefix_shares_nothing() -> None:
    graph, _, b, c = chain()
    c.add_control(b.node)
    c.span = EACH
    target = Graph()
    copies = clone_into(graph, target, "replica_1/")
    assert list(target.nodes) == ["replica_1/a", "replica_1/b", "replica_1/c"]
    copy = copies[c]
    assert copy.controls == (copies[b.node],)
    assert copy.span == EACH
    assert [v.name for v in copy.inputs] == ["replica_1/a", "replica_1/b"]
    copy.set_attr("_note", "only here")
    copy.set_input(0, copy.inputs[1])
    assert c.attr("_note") is None
    assert [v.name for v in c.inputs] == ["a", "b"]


def test_clone_into_the_same_graph_keeps_the_originals() -> None:
    graph, *_ = chain()
    copies = clone_into(graph, graph, "again/")
    assert len(graph) == 6
    assert copies[graph.node("c")].inputs[0].node is graph.node("again/a")


def test_clone_keeps_selectors_anchors_and_per_instance_attributes() -> None:
    graph = Graph()
    x = graph.add("Const", name="x", attrs={"value": 1.0, "dtype": FLOAT}, span=EACH)
    x.set_raw_attr("value", PerInstance((x.attrs["value"], x.attrs["value"])))
    total = graph.add("AddN", [x.output()], name="sum", attrs={"N": 2}, selects={0: Select.ALL})
    graph.anchors["loss"] = total.output()
    copy = graph.clone()
    assert copy.node("sum").selects == {0: Select.ALL}
    assert copy.anchors["loss"].node is copy.node("sum")
    assert copy.node("x").attr("value") == (1.0, 1.0)
    copy.node("sum").set_input(0, copy.value("x"), Select.FIRST)
    assert total.selects == {0: Select.ALL}


def test_a_chain_of_twenty_thousand_nodes_clones_in_a_second() -> None:
    graph = Graph()
    value = const(graph)
    attrs = graph.add("Neg", [value], name="first").attrs
    for i in range(20_000):
        node = Node(graph, f"n{i}", "Neg", "", dict(attrs), b"")
        value = graph.insert(node, [value]).output()
    with no_garbage_collection():  # as passes run: else what other tests have left behind is looked through
        start = time.thread_time()
        copy = graph.clone()
        assert time.thread_time() - start < 1
    assert len(copy) == 20_002


@pytest.mark.parametrize("name", ["a:1", "a:x", "a:", "a:-1", "^a", "ghost", "a:0:0"])
def test_a_tensor_name_that_means_nothing_is_refused(name: str) -> None:
    graph, *_ = chain()
    with pytest.raises(GraphError, match="'"):
        graph.value(name)


def test_a_tensor_name_means_output_zero_or_the_output_that_it_names() -> None:
    graph = Graph()
    x = const(graph, "x", [1.0, 2.0])
    top = graph.add("TopKV2", [x, const(graph, "k", 1, INT32)], name="top")
    assert graph.value("top") is graph.value("top:0") is top.output(0)
    assert graph.value("top:1") is top.output(1)
    assert top.output(1).dtype == INT32
    assert top.output(1).name == "top:1"


def test_a_misspelt_name_gets_the_closest_as_a_hint() -> None:
    graph = Graph()
    const(graph, "dense/kernel")
    with pytest.raises(GraphError, match="closest names: dense/kernel"):
        graph.node("dense/kernal")
    with pytest.raises(GraphError, match="closest names: dense/kernel"):
        graph.node("kernel")


def test_new_nodes_carry_the_pass_and_the_origin() -> None:
    graph, a, *_ = chain()
    assert PASS_ATTR not in a.node.attrs
    graph.current_pass = "reshard"
    new = graph.add("Identity", [a], name="copy", origin=a.node)
    assert new.attr(PASS_ATTR) == b"reshard"
    assert new.attr(ORIGIN_ATTR) == b"a"


def test_an_output_that_the_op_does_not_have_is_an_error_with_the_node() -> None:
    _, a, *_ = chain()
    with pytest.raises(GraphError, match="'a'"):
        _ = a.node.output(3).dtype


def test_a_node_that_becomes_another_op_forgets_the_outputs_that_it_has_no_more() -> None:
    graph, value, _, node = chain()
    handle = graph.add("VarHandleOp", name="w", attrs={"dtype": FLOAT, "shape": ()}).output()
    assert node.outputs
    become(node, "AssignVariableOp", [handle, value], {"dtype": FLOAT})
    assert node.read_outputs == node.outputs == ()
