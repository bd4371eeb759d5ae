"""`simulate`: what a ring, a server and a schedule take is computed by hand, and is found."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.analysis.op_work import work_of
from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Network
from autograph_rewrite.cost.hardware.machine import Compute, Link, Machine, network_link
from autograph_rewrite.cost.hardware.topology import IN, MESSAGE, OUT, REMOTE_RUN, Topology
from autograph_rewrite.cost.tasks.result import Simulation
from autograph_rewrite.cost.tasks.task import COMPUTE, EXCHANGE, Buffer, Task, lives_of, simulate_events
from autograph_rewrite.errors import GraphError, PlanError
from autograph_rewrite.inspect.communication import meetings
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies import STRATEGIES, named_builder
from autograph_rewrite.tools import cli
from tests.support.covering import covering
from tests.support.plan_tables import tables
from tests.support.small_items import regression

FAST = Machine(Compute({"matmul": 1e9, "elementwise": 1e9}, 1e9, 1e-6), cores=2)
JOB = {
    "devices": ["CPU:0"],
    "cluster": {"workers": ["a:1", "b:1"], "network": {"bandwidth_gbps": 8, "latency_us": 100}},
}


def planned(item: Any, name: str = "AllReduce", **config: Any) -> tuple[Plan, Config]:
    read = Config.of({"devices": ["CPU:0", "CPU:1"], **config, "strategy": {"name": name, "variables": "mirrored"}})
    return named_builder(read).build(item, read), read


def simulated(item: Any, name: str = "AllReduce", **config: Any) -> Simulation:
    plan, read = planned(item, name, **config)
    return ar.simulate(item, plan, read)


def test_a_link_takes_its_latency_and_its_bandwidth() -> None:
    link = network_link(Network(bandwidth_gbps=8.0, latency_us=100.0))
    assert (link.seconds, link.bytes_per_second) == pytest.approx((1e-4, 1e9))
    assert link.time(1e6, 3) == pytest.approx(3e-4 + 1e-3)


def test_a_ring_among_processes_takes_as_many_hops_as_a_ring_has() -> None:
    workers = [f"w{i}:1" for i in range(4)]
    plan, _ = planned(regression(), devices=["GPU:0"], cluster={"workers": workers})
    topology = Topology(plan, FAST, Link(1e-4, 1e9))
    ring = topology.ring_reduce(4e6)
    assert ring.seconds == pytest.approx(6 * 1e-4 + 6 * 1e6 / 1e9)
    assert ring.traffic == {OUT: 6e6, IN: 6e6}
    assert topology.ring_gather(1e6).seconds == pytest.approx(3 * (1e-4 + 1e-3))


def test_messages_of_a_ring_of_cpus_keep_their_processes_busy() -> None:
    plan, _ = planned(regression(), devices=["CPU:0"], cluster={"workers": ["a:1", "b:1"]})
    ring = Topology(plan, FAST, Link(1e-4, 1e9)).ring_reduce(4e6)
    assert ring.seconds == pytest.approx(2 * (1e-4 + MESSAGE) + 4e6 / 1e9)


@pytest.mark.parametrize(
    ("workers", "servers", "name", "parts"),
    [(3, 1, "PS", 3), (3, 0, "PS", 2), (3, 1, "AllReduce", 0), (1, 1, "PS", 0)],
)
def test_a_step_takes_longer_where_processes_run_parts_for_others(
    workers: int, servers: int, name: str, parts: int
) -> None:
    cluster = {"workers": [f"w{i}:1" for i in range(workers)], "ps": ["d:1"] * servers}
    plan, _ = planned(regression(), name, devices=["CPU:0"], cluster=cluster)
    assert Topology(plan, FAST, Link(1e-4, 1e9)).remote_seconds == pytest.approx(parts * REMOTE_RUN)


def test_what_one_server_has_for_others_leaves_it_one_after_another() -> None:
    plan, _ = planned(regression(), "PS", devices=["CPU:0"], cluster={"workers": ["a:1", "b:1", "c:1"]})
    topology = Topology(plan, FAST, Link(1e-4, 1e9))
    servers = [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(3)]
    sent = topology.hand_on(3e6, *servers)
    each = MESSAGE + 1e-3
    assert sent.seconds == pytest.approx(1e-4 + 2 * each)
    lanes = {"job:worker/task:0 out": 2 * each, "job:worker/task:1 in": each, "job:worker/task:2 in": each}
    assert sent.holds == pytest.approx(lanes)
    assert not topology.hand_on(3e6, servers[0], servers[0]).seconds, "they are in one process"


def test_all_processes_share_the_link_of_a_server() -> None:
    config = {"devices": ["GPU:0"], "cluster": {"workers": ["a:1", "b:1", "c:1"], "ps": ["d:1"]}}
    plan, _ = planned(regression(), "PS", **config)
    topology = Topology(plan, FAST, Link(1e-4, 1e9))
    push = topology.push(1e6, "/job:ps/replica:0/task:0/device:CPU:0")
    assert push.seconds == pytest.approx(1e-4 + 3 * (MESSAGE + 1e-3))
    assert push.holds == pytest.approx({OUT: MESSAGE + 1e-3, "job:ps/task:0 in": 3 * (MESSAGE + 1e-3)})
    near = topology.push(1e6, "/job:worker/replica:0/task:0/device:CPU:0")
    assert near.seconds == pytest.approx(1e-4 + 2 * (MESSAGE + 1e-3))  # one of the three is there already


def test_tasks_wait_for_what_they_need_and_for_their_lanes() -> None:
    first = Task("a", COMPUTE, "", {"cpu": 2.0}, 2.0)
    second = Task("b", COMPUTE, "", {"cpu": 2.0}, 2.0)
    wide = Task("c", COMPUTE, "", {"cpu": 1.0}, 1.0, width=2, needs=[first])
    sent = Task("d", EXCHANGE, "", {"net": 5.0}, 6.0, needs=[first])
    last = Task("e", COMPUTE, "", {"cpu": 1.0}, 1.0, needs=[sent])
    assert simulate_events([first, second, wide, sent, last], {"cpu": 2}) == 9.0
    assert (first.start, second.start, wide.start, sent.start, last.start) == (0.0, 0.0, 2.0, 2.0, 8.0)
    assert simulate_events([first, second], {"cpu": 1}) == 4.0


def test_a_task_of_several_cores_takes_those_that_are_free_if_it_ends_sooner_so() -> None:
    long, wide = Task("a", COMPUTE, "", {"cpu": 9.0}, 9.0), Task("b", COMPUTE, "", {"cpu": 2.0}, 2.0, width=2)
    assert simulate_events([long, wide], {"cpu": 2}) == 9.0
    assert (wide.start, wide.end) == (0.0, 4.0)  # alone on one core, twice as long
    short = Task("c", COMPUTE, "", {"cpu": 1.0}, 1.0)
    assert simulate_events([short, wide], {"cpu": 2}) == 3.0  # both, once the other has ended


def test_memory_is_given_back_after_the_last_reader_or_taken_over_by_it() -> None:
    tasks = [Task(name, COMPUTE, "", {"cpu": 1.0}, 1.0) for name in "abc"]
    for before, after in pairwise(tasks):
        after.needs.append(before)
    simulate_events(tasks, {"cpu": 1})
    buffers = [Buffer(100, "cpu", True, task) for task in tasks]
    buffers[0].readers.append(tasks[1])
    buffers[1].readers.append(tasks[2])
    assert lives_of([*buffers, Buffer(7, "cpu", True, kept=True)]).peak == 207
    tasks[1].reuses = tasks[2].reuses = True
    assert lives_of(buffers).peak == 100


def test_a_product_is_counted_by_its_shapes() -> None:
    node = regression().graph.node("gradient")  # x^T y
    assert work_of(node, [(8, 3), (8, 1)], [(3, 1)], 0.0).flops == 2 * 3 * 1 * 8
    assert work_of(regression().graph.node("w/Read"), [()], [(3, 1)], 12.0).nbytes == 0


@pytest.mark.parametrize(
    ("job", "name"),
    covering([{}, JOB, {"devices": ["GPU:0", "GPU:1", "GPU:2"]}], [name for name in STRATEGIES if name != "Pipeline"]),
)
def test_every_builder_can_be_simulated(name: str, job: dict[str, Any]) -> None:
    found = simulated(tables(), name, **job)
    again = simulated(tables(), name, **job)
    assert found == again
    assert found.step_seconds > 0
    assert 0 <= found.exposed_seconds <= found.step_seconds
    assert found.peak_bytes > 0
    assert json.loads(json.dumps(found.data()))["step_seconds"] == found.step_seconds


def test_variables_are_where_the_plan_puts_them() -> None:
    table = 12 * 4 * 4
    cluster = {"cluster": {"workers": ["a:1", "b:1"], "ps": ["c:1"]}, "devices": ["CPU:0"]}
    everywhere = simulated(tables(), **cluster).devices[0].variable_bytes
    use = {device.name: device.variable_bytes for device in simulated(tables(), "PS", **cluster).devices}
    assert use == {"cpu": 0, "job:ps/task:0 cpu": everywhere}
    parallax = {device.name: device.variable_bytes for device in simulated(tables(), "Parallax", **cluster).devices}
    assert parallax == {"cpu": everywhere - table, "job:ps/task:0 cpu": table}
    split = simulated(tables(), "FSDP", devices=["GPU:0", "GPU:1"]).devices[0].variable_bytes
    assert split < 0.65 * everywhere  # all but what is read inside the branch, and the scalar
    with_slot = everywhere - sum(4 * a for a in (48, 36, 24, 28, 4, 6, 1, 48))
    assert with_slot == 96  # the slot of kernel counts, too


def test_cpu_devices_of_one_process_hold_what_the_plan_puts_on_each() -> None:
    whole = simulated(tables()).devices[0].variable_bytes
    assert {device.variable_bytes for device in simulated(tables()).devices} == {whole}
    one = {device.name: device.variable_bytes for device in simulated(tables(), "PS").devices}
    assert one == {"first cpu device": whole, "other cpu devices": 0}
    two = {device.name: device.variable_bytes for device in simulated(tables(), "PSLoadBalancing").devices}
    assert sum(two.values()) == whole
    assert min(two.values()) > 0.3 * whole


def test_a_faster_network_shortens_a_step_that_waits_for_it() -> None:
    slow = {"devices": ["CPU:0"], "cluster": {"workers": ["a:1", "b:1"], "network": {"bandwidth_gbps": 0.001}}}
    fast = {"devices": ["CPU:0"], "cluster": {"workers": ["a:1", "b:1"], "network": {"bandwidth_gbps": 1000.0}}}
    assert simulated(tables(), **slow).step_seconds > 2 * simulated(tables(), **fast).step_seconds
    assert simulated(tables(), **slow).exposed_seconds > simulated(tables(), **fast).exposed_seconds


def test_a_thousand_devices_take_no_longer_than_two() -> None:
    config = {"devices": [f"GPU:{i}" for i in range(8)], "cluster": {"workers": [f"h{i}:1" for i in range(128)]}}
    began = time.process_time()  # whatever else the machine does
    found = simulated(tables(), **config)
    assert time.process_time() - began < 2.0
    assert found.replicas == 1024
    assert sum(device.count for device in found.devices) == 1024
    assert {link.name: link.count for link in found.links}[OUT] == 128


@pytest.mark.parametrize("job", [{}, JOB], ids=["process", "job"])
def test_the_bytes_are_those_that_comm_reports(job: dict[str, Any]) -> None:
    plan, config = planned(regression(), **job)
    new = ar.rewrite(regression(), config, task=0)
    reported = sum(meeting.bytes or 0 for meeting in meetings(new, new.report.plan) if meeting.keys is not None)
    found = ar.simulate(regression(), plan, config, batch=64)
    assert found.exchanged_bytes == reported > 0


@pytest.mark.parametrize("variables", ["shared", "mirrored"])
def test_the_buckets_of_a_job_have_the_bytes_of_all_their_gradients(variables: str) -> None:
    from tests.zoo import ZOO

    built = ZOO["mlp"].build(optimizer="adam", dtype="float32")
    inputs = dict(built.batch_inputs)
    item = ar.GraphItem.from_graph(
        built.graph, train_op=built.train_op, outputs=list(built.outputs), batch_inputs=inputs
    )
    new = ar.rewrite(item, {**JOB, "strategy": {"name": "AllReduce", "variables": variables}}, task=0)
    reported = {meeting.value: meeting.bytes for meeting in meetings(new) if meeting.keys is not None}
    assert None not in reported.values()
    found = ar.simulate(item, new.report.plan)
    assert found.exchanged_bytes == sum(nbytes or 0 for nbytes in reported.values()) > 300


def test_what_goes_through_servers_has_the_bytes_that_comm_reports() -> None:
    job = {**JOB, "cluster": {**JOB["cluster"], "ps": ["c:1"]}}  # type: ignore[dict-item]
    plan, config = planned(regression(), "PS", **job)
    new = ar.rewrite(regression(), config, task=0)
    tokens = sum(meeting.bytes or 0 for meeting in meetings(new) if "token" in meeting.value)
    reported = sum(meeting.bytes or 0 for meeting in meetings(new)) - tokens
    for one in (new.report.plan, plan):
        found = ar.simulate(regression(), one, config, batch=2)
        pulled = sum(exchange.bytes for exchange in found.exchanges if exchange.kind == "pull")
        assert pulled == regression().variables["w"].nbytes
        assert found.moved_bytes - pulled == reported > 0


def test_micro_batches_need_less_memory_and_exchange_once() -> None:
    from tests.zoo import ZOO

    built = ZOO["cnn"].build(optimizer="sgd", dtype="float32")
    inputs = dict(built.batch_inputs)
    item = ar.GraphItem.from_graph(
        built.graph, train_op=built.train_op, outputs=list(built.outputs), batch_inputs=inputs
    )
    found = {}
    for count in (1, 4):
        local = {"batch_norm": "local"}
        config = Config.of({"devices": ["CPU:0", "CPU:1"], "microbatches": count, "semantics": local})
        plan = named_builder(config).build(normalise(item), config)
        found[count] = ar.simulate(item, plan, config, batch=64, machine=Machine(onednn=True))
    assert found[4].peak_bytes < 0.6 * found[1].peak_bytes
    assert found[4].step_seconds > found[1].step_seconds  # as many ops start four times
    sent = [sum(one.bytes for one in each.exchanges if "step" not in one.owners) for each in found.values()]
    assert sent[0] == sent[1] > 0


def test_what_cannot_be_simulated_is_told() -> None:
    plan, config = planned(regression())
    with pytest.raises(GraphError, match="this item is distributed already"):
        ar.simulate(ar.rewrite(regression(), config), plan)
    with pytest.raises(PlanError, match="the graph has no variable 'w'"):
        ar.simulate(tables(), plan)
    lost = replace(plan.variables[0], placement="single")
    with pytest.raises(PlanError, match="'w' lives on one device, but 0 are named in servers"):
        ar.simulate(regression(), replace(plan, variables=(lost,)))


def test_the_trace_has_every_event_on_a_row_of_its_own() -> None:
    found = simulated(regression(), **JOB)
    events = [event for event in found.trace()["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events} == {COMPUTE, EXCHANGE}
    rows: dict[int, float] = {}
    for event in events:
        assert event["ts"] >= rows.get(event["tid"], 0.0) - 1e-6
        rows[event["tid"]] = event["ts"] + event["dur"]
    assert max(rows.values()) == pytest.approx(found.step_seconds * 1e6)


def test_the_verb_prints_and_writes_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regression().save(tmp_path / "g.ar")
    (tmp_path / "c.yaml").write_text("devices: [CPU:0, CPU:1]\nstrategy: {name: Parallax}\n")
    options = [str(tmp_path / "g.ar"), "--config", str(tmp_path / "c.yaml"), "--batch", "64"]
    assert cli.main(["simulate", *options, "--trace", str(tmp_path / "t.json")]) == 0
    assert "64 examples on 2 replicas" in capsys.readouterr().out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert cli.main(["simulate", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"] == 64
    assert cli.main(["simulate", str(tmp_path / "none.ar"), "--config", str(tmp_path / "c.yaml")]) == 2


def test_the_verb_does_not_start_tensorflow(
    tmp_path: Path, fresh_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    regression().save(tmp_path / "g.ar")
    (tmp_path / "c.yaml").write_text("devices: [CPU:0, CPU:1]\n")
    done = fresh_python(
        "import sys\nfrom autograph_rewrite.tools import cli\n"
        f"code = cli.main(['simulate', {str(tmp_path / 'g.ar')!r}, '--config', {str(tmp_path / 'c.yaml')!r}])\n"
        "print(code, 'tensorflow' in sys.modules)\n"
    )
    assert done.stdout.splitlines()[-1] == "0 False"
