"""A finished graph that could hang, share storage by accident or lose an update is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from autograph_rewrite.errors import GraphError, VerifyError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.verify.expanded import check_expanded, expanded_faults
from autograph_rewrite.item import GraphItem
from autograph_rewrite.training_graph import TensorInfo

FLOAT, INT32 = dtypes.FLOAT, dtypes.INT32
DEVICES = ("/device:CPU:0", "/device:CPU:1")


def info(name: str) -> TensorInfo:
    return TensorInfo(name, f"{name}:0", "float32", ())


def handle(graph: Graph, name: str, device: str = "", shared: str | None = None) -> Value:
    attrs = {"dtype": FLOAT, "shape": (), "shared_name": name if shared is None else shared}
    return graph.add("VarHandleOp", name=name, attrs=attrs, device=device).output()


def read(graph: Graph, name: str, of: Value, device: str = "") -> Value:
    return graph.add("ReadVariableOp", [of], name=name, attrs={"dtype": FLOAT}, device=device).output()


def original() -> GraphItem:
    """Return a step that reduces two values and subtracts them from two variables."""
    graph = Graph()
    x = graph.add("Placeholder", name="x", attrs={"dtype": FLOAT}).output()
    updates, inits = [], []
    for name in ("v", "w"):
        variable = handle(graph, name)
        inits.append(graph.add("AssignVariableOp", [variable, zero(graph, name)], name=f"{name}/Assign"))
        gradient = graph.add("Mul", [x, read(graph, f"{name}/Read", variable)], name=f"{name}/grad").output()
        updates.append(graph.add("AssignSubVariableOp", [variable, gradient], name=f"{name}/update"))
    graph.add("Neg", [x], name="loss")
    graph.add("NoOp", name="train", controls=updates)
    graph.add("NoOp", name="init", controls=inits)
    return GraphItem(graph, {"x": info("x")}, {"loss": info("loss")}, ("train",), "init")


def zero(graph: Graph, name: str) -> Value:
    return graph.add("Const", name=f"{name}/zero", attrs={"value": np.float32(0), "dtype": FLOAT}).output()


@dataclass
class Mirrored:
    """The step above, mirrored over devices by hand."""

    graph: Graph = field(default_factory=Graph)
    orders: tuple[tuple[str, ...], ...] = (("v", "w"), ("v", "w"))
    key: dict[str, int] = field(default_factory=lambda: {"v": 11, "w": 12})
    reduced: dict[tuple[str, int], Node] = field(default_factory=dict)

    def build(self) -> Graph:
        graph = self.graph
        x = graph.add("Placeholder", name="x", attrs={"dtype": FLOAT}).output()
        self.keys = {
            k: self.const(f"key_{k}", v) for k, v in {"size": len(self.orders), "group": 7, **self.key}.items()
        }
        updates, inits, losses = [], [], []
        for r, order in enumerate(self.orders):
            prefix = f"replica_{r}/" if r else ""
            last: list[Node] = []
            for name in order:
                device = DEVICES[r % 2]
                variable = handle(graph, prefix + name, device)
                inits.append(
                    graph.add("AssignVariableOp", [variable, zero(graph, prefix + name)], name=f"{prefix}{name}/Assign")
                )
                raw = graph.add(
                    "Mul", [x, read(graph, f"{prefix}{name}/Read", variable)], name=f"replica_{r}/{name}/grad"
                )
                reduce = self.collective(raw.output(), f"replica_{r}/{name}/reduce", device, name, last)
                self.reduced[name, r] = reduce
                last = [reduce]
                updates.append(
                    graph.add(
                        "AssignSubVariableOp", [variable, reduce.output()], name=f"{prefix}{name}/update", device=device
                    )
                )
            losses.append(graph.add("Neg", [x], name=f"replica_{r}/loss").output())
        graph.add("AddN", losses, name="loss")
        graph.add("NoOp", name="train", controls=updates)
        graph.add("NoOp", name="init", controls=inits)
        return graph

    def const(self, name: str, value: int) -> Value:
        return self.graph.add("Const", name=name, attrs={"value": np.int32(value), "dtype": INT32}).output()

    def collective(self, value: Value, name: str, device: str, instance: str, after: list[Node]) -> Node:
        keys = [self.keys["size"], self.keys["group"], self.keys[instance]]
        attrs = {"merge_op": "Add", "final_op": "Id"}
        return self.graph.add(
            "CollectiveReduceV2", [value, *keys], name=name, attrs=attrs, device=device, controls=after
        )


def problems(graph: Graph, item: GraphItem | None = None, **options: Any) -> list[str]:
    return [fault.problem for fault in expanded_faults(graph, item or original(), DEVICES, **options)]


def test_a_sound_mirrored_graph_passes_as_a_graph_and_as_bytes() -> None:
    graph = Mirrored().build()
    check_expanded(graph, original(), DEVICES)
    check_expanded(serde.to_bytes(graph), original(), DEVICES)
    check_expanded(original().graph, original(), DEVICES)


def test_bytes_that_are_no_graph_are_refused() -> None:
    with pytest.raises(GraphError):
        check_expanded(b"\xff\xff", original())


def test_opposite_orders_on_two_devices_are_a_deadlock() -> None:
    found = problems(Mirrored(orders=(("v", "w"), ("w", "v"))).build())
    assert len(found) == 1
    assert "(group 7, instance 11)" in found[0]
    assert "(group 7, instance 12)" in found[0]
    assert "wait for each other" in found[0]
    assert "on CPU:0" in found[0]
    assert "on CPU:1" in found[0]


def test_a_deadlock_through_a_chain_of_ops_and_three_collectives_is_found() -> None:
    mirrored = Mirrored(orders=(("v", "w"), ("v", "w")))
    graph = mirrored.build()
    middle = graph.add("NoOp", name="middle", controls=[mirrored.reduced["w", 0]])
    mirrored.reduced["v", 1].add_control(graph.add("NoOp", name="end", controls=[middle]))
    assert any("wait for each other" in problem for problem in problems(graph))


def test_a_member_that_needs_its_peer_s_result_can_never_start() -> None:
    mirrored = Mirrored()
    graph = mirrored.build()
    mirrored.reduced["v", 1].add_control(mirrored.reduced["v", 0])
    assert any("needs the result of its member" in problem for problem in problems(graph))


def test_unordered_collectives_may_meet_in_any_order() -> None:
    mirrored = Mirrored()
    graph = mirrored.build()
    for r in (0, 1):
        mirrored.reduced["w", r].remove_control(mirrored.reduced["v", r])
    assert problems(graph) == []


def spoil_missing_member(graph: Graph, mirrored: Mirrored) -> None:
    node = mirrored.reduced["v", 1]
    node.output().replace_all_uses_with(node.inputs[0])
    for user in node.control_users:
        user.remove_control(node)
    graph.erase(node)


def spoil_device(graph: Graph, mirrored: Mirrored) -> None:
    mirrored.reduced["v", 1].set_device(DEVICES[0])


def spoil_no_device(graph: Graph, mirrored: Mirrored) -> None:
    mirrored.reduced["v", 1].set_device("")


def spoil_keys(graph: Graph, mirrored: Mirrored) -> None:
    for r in (0, 1):
        mirrored.reduced["w", r].set_input(3, mirrored.keys["v"])


def spoil_dtype(graph: Graph, mirrored: Mirrored) -> None:
    node = mirrored.reduced["v", 1]
    wide = graph.add("Cast", [node.inputs[0]], name="wide", attrs={"DstT": dtypes.DOUBLE}).output()
    node.output().replace_all_uses_with(graph.add("Cast", [wide], name="narrow", attrs={"DstT": FLOAT}).output())
    node.set_input(0, wide)
    node.set_attr("T", dtypes.DOUBLE)


def spoil_merge(graph: Graph, mirrored: Mirrored) -> None:
    mirrored.reduced["v", 1].set_attr("merge_op", "Max")


def spoil_runtime_key(graph: Graph, mirrored: Mirrored) -> None:
    key = graph.add("Placeholder", name="key", attrs={"dtype": INT32}).output()
    mirrored.reduced["v", 1].set_input(2, key)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_missing_member, "(group 7, instance 11) has 1 members; it needs 2"),
        (spoil_device, "has 2 members on '/device:CPU:0'"),
        (spoil_no_device, "has no device"),
        (spoil_keys, "(group 7, instance 11) has 4 members; it needs 2"),
        (spoil_dtype, "differ in their 'T'"),
        (spoil_merge, "differ in their 'merge_op'"),
        (spoil_runtime_key, "the keys of 'replica_1/v/reduce' are not constants"),
    ],
)
def test_members_of_a_collective_must_match(spoil: Callable[[Graph, Mirrored], None], message: str) -> None:
    mirrored = Mirrored()
    graph = mirrored.build()
    spoil(graph, mirrored)
    assert any(message in problem for problem in problems(graph)), problems(graph)


def test_members_in_other_processes_count() -> None:
    mirrored = Mirrored(key={"v": 11, "w": 12})
    graph = mirrored.build()
    graph.node("key_size").set_attr("value", np.int32(6))
    assert problems(graph, processes=3) == []
    assert any("has 2 members; it needs 6" in problem for problem in problems(graph))


def test_a_fetch_that_reaches_one_member_only_would_hang() -> None:
    mirrored = Mirrored()
    graph = mirrored.build()
    graph.node("loss").set_inputs([mirrored.reduced["w", 0].output(), graph.value("replica_1/loss")])
    (problem,) = problems(graph)
    assert "running output 'loss' alone hangs" in problem
    assert "replica_1/v/reduce" in problem or "replica_1/w/reduce" in problem


def test_an_original_name_that_is_lost_or_retyped_is_named() -> None:
    graph = Mirrored().build()
    graph.erase(graph.node("loss"))
    graph.erase(graph.node("init"))
    assert problems(graph) == [
        "the output 'loss:0' does not resolve: the graph has no node 'loss'",
        "the target 'init' is not in the graph",
    ]
    graph = Mirrored().build()
    graph.erase(graph.node("loss"))
    graph.add("Cast", [graph.value("x")], name="loss", attrs={"DstT": INT32})
    assert problems(graph) == ["the output 'loss:0' has changed its element type"]


def test_a_lost_update_is_named_with_the_variable() -> None:
    graph = Mirrored().build()
    graph.node("train").remove_control(graph.node("v/update"))
    graph.node("train").remove_control(graph.node("replica_1/v/update"))
    assert any("the step writes 'v' 1 times, now never" in problem for problem in problems(graph))


def test_an_update_that_happens_twice_is_named_with_the_copy() -> None:
    graph = Mirrored().build()
    again = graph.add("AssignSubVariableOp", [graph.value("replica_1/w"), graph.value("x")], name="again")
    graph.node("train").add_control(again)
    assert problems(graph) == ["the step writes 'replica_1/w' 2 times; the original 1 times"]


def test_a_copy_that_is_never_initialised_is_named() -> None:
    graph = Mirrored().build()
    graph.node("init").remove_control(graph.node("v/Assign"))
    graph.node("init").remove_control(graph.node("replica_1/v/Assign"))
    assert any("the initialisation writes 'v' 1 times, now never" in problem for problem in problems(graph))


def test_writes_are_found_through_ops_that_hand_a_handle_on() -> None:
    item = original()
    graph = Mirrored().build()
    alias = graph.add("Identity", [graph.value("v")], name="alias").output()
    graph.node("v/update").set_input(0, alias)
    assert problems(graph, item) == []


def test_two_copies_of_a_variable_on_one_device_share_their_storage() -> None:
    graph = Mirrored().build()
    for name in ("v", "replica_1/v"):
        graph.node(name).set_attr("shared_name", "v")
    assert problems(graph) == []
    graph.node("replica_1/v").set_device(DEVICES[0])
    (problem,) = problems(graph)
    assert "'replica_1/v' and 'v' share their storage on CPU:0" in problem


def test_two_variables_that_collide_by_name_share_their_storage() -> None:
    graph = Mirrored().build()
    graph.node("w").set_attr("shared_name", "v")
    assert any("'w' and 'v' share their storage" in problem for problem in problems(graph))


def test_two_handles_of_one_variable_may_share_it_as_they_did() -> None:
    item = original()
    graph = Mirrored().build()
    for one in (item.graph, graph):
        handle(one, "again", device=DEVICES[0] if one is graph else "", shared="v")
    assert problems(graph, item) == []


def test_anonymous_handles_share_nothing() -> None:
    graph = Mirrored().build()
    for name in ("v", "w"):
        graph.node(name).set_attr("shared_name", "cd2c89b7-88b7-44c8-ad83-06c2a9158347")
    assert problems(graph) == []


def test_a_device_outside_the_plan_is_named() -> None:
    graph = Mirrored().build()
    graph.node("replica_1/loss").set_device("/device:GPU:0")
    assert any("'replica_1/loss' (1 nodes) is on '/device:GPU:0'" in problem for problem in problems(graph))


def test_a_graph_that_is_still_folded_is_refused() -> None:
    graph = Mirrored().build()
    graph.node("train").span = EACH
    with pytest.raises(VerifyError, match="'train' is still folded"):
        check_expanded(graph, original(), DEVICES)


def test_broken_edges_are_reported_before_anything_that_relies_on_them() -> None:
    graph = Mirrored().build()
    graph.node("loss").drop_attr("N")
    assert problems(graph) == ["'loss': a AddN node lacks its attribute 'N'"]


def sized_keys(mirrored: Mirrored, rows: tuple[int, int] = (64, 64)) -> Graph:
    """Let the instance key of `v` follow from the size of what is sent, as changing shapes need."""
    graph = mirrored.build()
    for r in (0, 1):
        node = mirrored.reduced["v", r]
        size = graph.add("Size", [node.inputs[0]], name=f"replica_{r}/size").output()
        row = mirrored.const(f"replica_{r}/row", rows[r])
        node.set_input(3, graph.add("AddV2", [size, row], name=f"replica_{r}/key").output())
    return graph


def test_keys_that_follow_from_a_size_in_the_same_way_belong_together() -> None:
    assert problems(sized_keys(Mirrored())) == []
    found = problems(sized_keys(Mirrored(), rows=(64, 65)))
    assert any("(group 7, instance 64+by size) has 1 members; it needs 2" in problem for problem in found)
