"""Expansion puts each instance on the device of its coordinates, along its span and at its place."""

from __future__ import annotations

from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import EACH, MICRO, MODEL, PER_REPLICA, REPLICA, SERVER, STAGE, Axis, Mesh
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.emit.expand import expand
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout

HOME = "/job:ps/device:CPU:0"
MESH = Mesh(
    (Axis(REPLICA, 2), Axis(MICRO, 2), Axis(STAGE, 2), Axis(MODEL, 1), Axis(SERVER, 1)),
    devices=tuple(f"/device:CPU:{number}" for number in range(4)),  # of two stages of each of two replicas
    shared=(HOME,),
)


def devices(graph: Graph, common: bool = False) -> dict[str, str]:
    """Return the devices of the instances of a graph, by their names."""
    data = expand(graph, ReplicaLayout(MESH), set(graph) if common else set())
    return {node.name: node.device for node in serde.from_bytes(data)}


def test_instances_of_a_stage_are_on_the_devices_that_the_replicas_have_for_it() -> None:
    graph = Graph()
    x = graph.add("Placeholder", name="x", attrs={"dtype": dtypes.FLOAT}, span=EACH).output()
    graph.add("Neg", [x], name="y", span=EACH, place={STAGE: 1})
    found = devices(graph)
    assert [found[f"replica_{r}/micro_{m}/x"][-1] for r in range(2) for m in range(2)] == ["0", "0", "2", "2"]
    assert [found[f"replica_{r}/micro_{m}/y"][-1] for r in range(2) for m in range(2)] == ["1", "1", "3", "3"]


def test_what_all_replicas_share_is_on_one_device_whichever_stage_it_is_of() -> None:
    graph = Graph()
    graph.add("Placeholder", name="x", attrs={"dtype": dtypes.FLOAT}, span=EACH, place={STAGE: 1, SERVER: 0})
    assert set(devices(graph).values()) == {HOME}
    assert len(devices(graph)) == 4


def test_what_a_replica_has_once_for_its_micro_batches_has_a_place_like_the_rest() -> None:
    graph = Graph()
    graph.add("Placeholder", name="x", attrs={"dtype": dtypes.FLOAT}, span=PER_REPLICA, place={STAGE: 1})
    assert devices(graph, common=True) == {"x": "/device:CPU:1", "replica_1/x": "/device:CPU:3"}
