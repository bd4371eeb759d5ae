"""Each invariant is broken by hand, and the verifier names the place and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings

from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH, PROCESS, REPLICA, SERVER, SHARD, STAGE, Axis, Mesh, PerInstance, Select
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.verify.folded import check_folded, folded_faults
from tests.ir.test_random_edits import graphs

DEVICES = ("/device:CPU:0", "/device:CPU:1")
FLOAT, INT32 = dtypes.FLOAT, dtypes.INT32


def folded() -> Graph:
    """Return x (each) -> y (each) -> total (once, all) -> loss, and a first reader."""
    graph = Graph()
    x = graph.add("Placeholder", name="x", attrs={"dtype": FLOAT}, span=EACH).output()
    y = graph.add("Neg", [x], name="y", span=EACH).output()
    total = graph.add("AddN", [y], name="total", attrs={"N": 2}, selects={0: Select.ALL}).output()
    axis = const(graph, "axis", 0)
    graph.add("ConcatV2", [x, axis], name="joined", attrs={"N": 2}, selects={0: Select.ALL})
    graph.add("Neg", [x], name="first", selects={0: Select.FIRST})
    graph.anchors["loss"] = graph.add("Neg", [total], name="loss", device=DEVICES[0]).output()
    return graph


def const(graph: Graph, name: str, value: int) -> Value:
    return graph.add("Const", name=name, attrs={"value": np.int32(value), "dtype": INT32}).output()


def problems(graph: Graph, replicas: int = 2, devices: tuple[str, ...] = DEVICES) -> list[str]:
    return [fault.problem for fault in folded_faults(graph, Mesh.of(replicas), devices)]


def test_a_sound_folded_graph_passes() -> None:
    check_folded(folded(), Mesh.of(2), DEVICES)
    check_folded(folded(), Mesh.of(2))


def test_every_real_graph_passes() -> None:
    with tf.Graph().as_default() as original:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        w = tf.compat.v1.get_variable("w", [4, 3], use_resource=True)
        v = tf.compat.v1.get_variable("v", [3], use_resource=False)
        with tf.device("/gpu:0"):
            y = tf.matmul(x, w) + v
        _, s = tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s * tf.reduce_sum(y)), [0, tf.constant(1.0)])
        tf.compat.v1.train.AdamOptimizer().minimize(s)
    check_folded(serde.from_bytes(original.as_graph_def().SerializeToString()), Mesh.of(1))


@settings(max_examples=50)
@given(graphs())
def test_every_random_graph_passes(graph: Graph) -> None:
    check_folded(graph, Mesh.of(1), ("/device:CPU:0",))


def break_use(graph: Graph) -> None:
    graph.value("x")._uses.pop((graph.node("y"), 0))


def break_stale_use(graph: Graph) -> None:
    graph.value("x")._uses[graph.node("loss"), 0] = None


def break_foreign_input(graph: Graph) -> None:
    graph.node("loss").set_input(0, folded().value("total"))


def break_erased_input(graph: Graph) -> None:
    del graph.nodes["total"]


def break_control(graph: Graph) -> None:
    graph.node("loss")._controls[graph.node("x")] = None


def break_control_user(graph: Graph) -> None:
    graph.node("x")._control_users[graph.node("loss")] = None


def break_name(graph: Graph) -> None:
    graph.node("loss").name = "other"


def break_cycle(graph: Graph) -> None:
    graph.node("x").add_control(graph.node("y"))


def break_dtype(graph: Graph) -> None:
    graph.node("loss").set_attr("T", dtypes.INT64)


def break_arity(graph: Graph) -> None:
    graph.node("loss").set_inputs([graph.value("total"), graph.value("total")])


def break_output_index(graph: Graph) -> None:
    graph.node("loss").set_input(0, graph.node("total").output(3))


def break_op(graph: Graph) -> None:
    graph.insert(Node(graph, "mine", "NoSuchOp", "", {}, b""))


def break_attr(graph: Graph) -> None:
    graph.node("loss").drop_attr("T")


def break_device_syntax(graph: Graph) -> None:
    graph.node("y").set_device("/device:CPU")


def break_device(graph: Graph) -> None:
    graph.current_pass = "place"
    graph.add("NoOp", name="placed", device="/device:CPU:7")


def break_missing_selector(graph: Graph) -> None:
    graph.node("first").set_input(0, graph.value("x"))


def break_missing_selector_beside_another(graph: Graph) -> None:
    graph.node("joined").set_input(
        1, graph.add("Const", name="a", attrs={"value": 0, "dtype": INT32}, span=EACH).output()
    )


def break_selector_of_each(graph: Graph) -> None:
    graph.node("y").selects[0] = Select.FIRST


def break_selector_of_once(graph: Graph) -> None:
    graph.node("loss").selects[0] = Select.FIRST


def break_selector_index(graph: Graph) -> None:
    graph.node("first").selects[4] = Select.FIRST


def break_all_without_list(graph: Graph) -> None:
    graph.node("first").set_input(0, graph.value("x"), Select.ALL)


def break_all_on_two_inputs(graph: Graph) -> None:
    graph.add("AddV2", [graph.value("axis"), graph.value("axis")], name="pair")
    graph.node("pair").set_attr("T", FLOAT)
    graph.node("pair").set_inputs([graph.value("x")], {0: Select.ALL})


def break_container(graph: Graph) -> None:
    size = graph.value("axis")
    array = graph.add("TensorArrayV3", [size], name="array", attrs={"dtype": FLOAT}, span=EACH)
    handle, flow, x = array.output(0), array.output(1), graph.value("x")
    attrs, selects = {"T": FLOAT}, dict.fromkeys((0, 2, 3), Select.FIRST)
    graph.add("TensorArrayWriteV3", [handle, size, x, flow], name="put", attrs=attrs, selects=selects)
    graph.add("TensorArrayReadV3", [handle, size, flow], name="get", attrs={"dtype": FLOAT}, span=EACH)


def break_array(graph: Graph) -> None:
    size, x = graph.value("axis"), graph.value("x")
    array = graph.add("TensorArrayV3", [size], name="array", attrs={"dtype": FLOAT}, span=EACH)
    for name in ("put", "put_again"):
        inputs = [array.output(0), size, x, array.output(1)]
        graph.add("TensorArrayWriteV3", inputs, name=name, attrs={"T": FLOAT}, span=EACH)


def break_count(graph: Graph) -> None:
    graph.node("joined").set_attr("N", 3)


def break_instances(graph: Graph) -> None:
    raw = encode("shape", ())
    graph.node("x").set_raw_attr("shape", PerInstance((raw, raw, raw)))


def break_instances_of_once(graph: Graph) -> None:
    raw = graph.node("axis").attrs["value"]
    graph.node("axis").set_raw_attr("value", PerInstance((raw, raw)))


def break_instance_types(graph: Graph) -> None:
    graph.node("x").set_raw_attr("dtype", PerInstance((encode("type", FLOAT),) * 2))


def break_attr_bytes(graph: Graph) -> None:
    graph.node("x").set_raw_attr("shape", (1, 2))  # type: ignore[arg-type]


def break_anchor(graph: Graph) -> None:
    graph.anchors["loss"] = folded().value("loss")


def collective(graph: Graph, name: str, size: int) -> Node:
    keys = [const(graph, f"{name}/{key}", number) for key, number in (("size", size), ("group", 7), ("instance", 9))]
    attrs = {"merge_op": "Add", "final_op": "Id"}
    return graph.add("CollectiveReduceV2", [graph.value("y"), *keys], name=name, attrs=attrs, span=EACH)


def break_collective_size(graph: Graph) -> None:
    collective(graph, "reduce", 3)


def break_collective_keys(graph: Graph) -> None:
    collective(graph, "reduce", 2)
    collective(graph, "again", 2)


BREAKS: list[tuple[Callable[[Graph], None], str]] = [
    (break_use, "'x' does not know its reader 'y'"),
    (break_stale_use, "'x' believes that 'loss' reads it"),
    (break_foreign_input, "'loss' reads 'total', which is not in the graph"),
    (break_erased_input, "'loss' reads 'total', which is not in the graph"),
    (break_control, "'x' does not know that 'loss' waits for it"),
    (break_control_user, "'x' believes that 'loss' waits for it"),
    (break_name, "'other' stands in the graph as 'loss'"),
    (break_cycle, "cycle: "),
    (break_dtype, "'loss' takes int64 where 'total' gives float32"),
    (break_arity, "'loss' has 2 inputs; its op and attributes ask for 1"),
    (break_output_index, "'loss' reads 'total:3', but AddN has 1 outputs"),
    (break_op, "'mine' has the unknown op 'NoSuchOp'"),
    (break_attr, "'loss': a Neg node lacks its attribute 'T'"),
    (break_device_syntax, "'y' is on '/device:CPU', which is no device"),
    (break_device, "'placed' is on '/device:CPU:7', which the plan does not have"),
    (break_missing_selector, "'first' runs once and reads each 'x' without a selector"),
    (break_missing_selector_beside_another, "'joined' runs once and reads each 'a' without a selector"),
    (break_selector_of_each, "'y' runs on each replica, so it cannot select instances"),
    (break_selector_of_once, "'loss' selects instances of 'total', which runs once"),
    (break_selector_index, "'first' selects instances of an input 4"),
    (break_all_without_list, "'first' takes all instances as input 0, where Neg has no list"),
    (break_all_on_two_inputs, "'pair' takes all instances as input 0, where AddV2 has no list"),
    (break_container, "'get' reads each what 'put' puts into a container once"),
    (break_array, "'put' and 'put_again' write the same elements of a tensor array"),
    (break_count, "'joined' has 3 inputs; its op and attributes ask for 4"),
    (break_instances, "'x' has 3 values of 'shape' for 2 replicas"),
    (break_instances_of_once, "'axis' runs once, but its attribute 'value' differs between instances"),
    (break_instance_types, "decides a type by 'dtype'"),
    (break_attr_bytes, "'x' has an attribute 'shape' that is not encoded"),
    (break_collective_size, "collective (group 7, instance 9) of 3 members runs on 2 replicas"),
    (break_collective_keys, "'reduce' and 'again' are both collective (group 7, instance 9)"),
    (break_anchor, "the outside name 'loss' points to 'loss', which is not in the graph"),
]


@pytest.mark.parametrize(("spoil", "message"), BREAKS, ids=[spoil.__name__ for spoil, _ in BREAKS])
def test_a_broken_invariant_is_named(spoil: Callable[[Graph], None], message: str) -> None:
    graph = folded()
    spoil(graph)
    found = problems(graph)
    assert any(message in problem for problem in found), found
    assert len(found) <= 3, "one break is not a hundred messages"
    with pytest.raises(VerifyError) as caught:
        check_folded(graph, Mesh.of(2), DEVICES)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_all_faults_are_reported_together_and_the_list_is_bounded() -> None:
    graph = folded()
    break_cycle(graph)
    break_device_syntax(graph)
    break_count(graph)
    with pytest.raises(VerifyError) as caught:
        check_folded(graph, Mesh.of(2), DEVICES)
    assert "3 invariants are broken" in str(caught.value)
    for i in range(50):
        graph.insert(Node(graph, f"n{i}", "NoSuchOp", "", {}, b""))
    with pytest.raises(VerifyError, match="and 41 more") as caught:
        check_folded(graph, Mesh.of(2), DEVICES)
    assert len(str(caught.value).splitlines()) < 20


def test_a_collective_may_span_several_processes() -> None:
    graph = folded()
    collective(graph, "reduce", 6)
    assert problems(graph) == []


def test_the_wrong_number_of_replicas_is_noticed() -> None:
    assert any("'total' has 3 inputs" in problem for problem in problems(folded(), replicas=3))


def test_the_users_own_placement_may_be_anything_that_can_be_read() -> None:
    graph = folded()
    for device in ("/gpu:3", "/job:worker/task:1", "/device:GPU:*", "/cpu:0", "/job:ps/replica:0/task:0/device:CPU:0"):
        graph.node("y").set_device(device)
        assert problems(graph) == []


def test_a_function_called_by_its_own_name_is_no_unknown_op() -> None:
    from autograph_rewrite.ir.types.protos import proto

    graph = folded()
    break_op(graph)
    library = proto("FunctionDefLibrary")()
    library.function.add().signature.name = "NoSuchOp"
    graph.library = library.SerializeToString()
    assert problems(graph) == []


def test_a_reference_may_be_read_as_a_value_but_not_the_other_way_round() -> None:
    graph = Graph()
    ref = graph.add("VariableV2", name="v", attrs={"shape": (), "dtype": FLOAT})
    graph.add("Neg", [ref.output()], name="neg")
    value = graph.add("Neg", [ref.output()], name="value")
    assert problems(graph) == []
    graph.add("Assign", [value.output(), value.output()], name="assign")
    assert problems(graph) == ["'assign' takes float32_ref where 'value' gives float32"]


def looped(graph: Graph) -> Node:
    """Add a loop that carries a number, and return its Exit."""
    zero = graph.add("Const", name="zero", attrs={"value": np.float32(0), "dtype": FLOAT}).output()
    go = graph.add("Placeholder", name="go", attrs={"dtype": dtypes.BOOL}).output()
    enter = graph.add("Enter", [zero], name="enter", attrs={"frame_name": "loop"}).output()
    merge = graph.add("Merge", [enter, enter], name="merge")
    runs = graph.add("Enter", [go], name="runs", attrs={"frame_name": "loop", "is_constant": True}).output()
    condition = graph.add("LoopCond", [runs], name="cond").output()
    switch = graph.add("Switch", [merge.output(), condition], name="switch")
    body = graph.add("Neg", [switch.output(1)], name="body").output()
    merge.set_input(1, graph.add("NextIteration", [body], name="next").output())
    return graph.add("Exit", [switch.output(0)], name="exit")


def test_a_loop_that_needs_what_waits_for_its_end_is_found() -> None:
    """No edge of it closes a cycle, for another loop variable hands out what enters again."""
    graph = Graph()
    total = graph.add("Neg", [looped(graph).output()], name="total").output()
    assert problems(graph) == []
    again = graph.add("Enter", [total], name="again", attrs={"frame_name": "loop", "is_constant": True})
    graph.add("Mul", [again.output(), graph.node("body").output()], name="scaled")
    assert problems(graph) == ["'again' in the loop 'loop' needs 'total', which waits for its end"]


def test_what_gets_into_a_loop_or_out_of_it_by_no_door_is_found() -> None:
    graph = Graph()
    looped(graph)
    graph.node("body").set_inputs([graph.node("switch").output(1)])
    graph.add("Mul", [graph.node("body").output(), graph.node("zero").output()], name="in")
    graph.add("NoOp", name="end", controls=[graph.node("exit")])
    assert problems(graph) == ["'in' is in the loop 'loop' and reads 'zero', which is in no loop"]


def test_ten_thousand_nodes_are_checked_in_a_fraction_of_a_second() -> None:
    graph = Graph()
    value = graph.add("Placeholder", name="x", attrs={"dtype": FLOAT}, span=EACH).output()
    attrs = dict(graph.add("Mul", [value, value], name="first").attrs)
    graph.erase(graph.node("first"))
    for i in range(10_000):
        node = Node(graph, f"n{i}", "Mul", "/device:CPU:0", dict(attrs), b"")
        node.span = EACH
        value = graph.insert(node, [value, value]).output()
    start = time.process_time()
    check_folded(graph, Mesh.of(8), DEVICES)
    assert time.process_time() - start < 0.5


def test_what_only_one_branch_of_a_loop_makes_is_not_carried_on() -> None:
    """Where the branch is not taken, TensorFlow ends the step without values, and without an error."""
    graph = Graph()
    looped(graph)
    wanted = graph.add("Placeholder", name="wanted", attrs={"dtype": dtypes.BOOL}).output()
    entered = graph.add("Enter", [wanted], name="is_wanted", attrs={"frame_name": "loop", "is_constant": True})
    branch = graph.add("Switch", [graph.value("body:0"), entered.output()], name="branch")
    graph.node("next").set_inputs([branch.output(1)])
    problem = "'next' carries 'branch:1' on, which is there only where 'wanted' is true"
    assert problems(graph) == [f"{problem}: its loop would end without values"]
    ended = graph.add("Merge", [branch.output(0), branch.output(1)], name="ended")
    graph.node("next").set_inputs([ended.output()])
    assert problems(graph) == []


PLACES = (Axis(STAGE, 2), Axis(SERVER, 1), Axis(PROCESS, 3))


def faults_of(node: str, place: dict[str, int]) -> list[str]:
    """Return what is wrong with the sound graph once a node of it has a place."""
    graph = folded()
    graph.node(node).set_place(place)
    return [fault.problem for fault in folded_faults(graph, Mesh.of(2, places=PLACES), DEVICES)]


def test_coordinates_on_the_axes_of_the_mesh_are_sound() -> None:
    assert faults_of("y", {STAGE: 1, SERVER: 0}) == []
    assert faults_of("total", {SERVER: 0, PROCESS: 0}) == []


def test_a_node_with_instances_along_an_axis_has_no_coordinate_on_it() -> None:
    assert faults_of("y", {REPLICA: 1}) == ["'y' has instances along the axis replica, and a coordinate on it"]
    assert faults_of("loss", {REPLICA: 1}) == [], "on the second replica alone"


def test_a_coordinate_beyond_the_mesh_is_found() -> None:
    assert faults_of("y", {STAGE: 2}) == ["'y' is at stage 2, and the mesh has 2"]
    assert faults_of("y", {SHARD: 0}) == ["'y' is at shard 0, and the mesh has no such axis"]
    assert faults_of("y", {"expert": 0}) == ["'y' has a place along 'expert', which is no axis of a mesh"]


def test_what_one_worker_runs_for_all_runs_once() -> None:
    assert faults_of("y", {PROCESS: 0}) == ["'y' is what one worker runs for all, but runs on each replica"]
