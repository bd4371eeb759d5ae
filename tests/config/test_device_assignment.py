"""A device assignment is the mesh that TensorFlow's own would be, and what cannot be is refused at its line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite.config.config import Config
from autograph_rewrite.config.device_assignment import replicas_of
from autograph_rewrite.config.sections import DeviceAssignment
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ir.types.device_names import short
from autograph_rewrite.plan.replica_devices import devices_by_replica
from tests.support import split_models as models

FOUR = [f"CPU:{i}" for i in range(4)]
SIZES = (1, 2, 4)


def assigned(count: int = 4, **given: Any) -> Config:
    """Return a configuration with a device assignment over virtual CPUs."""
    return Config.of({"devices": [f"CPU:{i}" for i in range(count)], "device_assignment": given})


def devices_of(config: Config) -> list[list[str]]:
    """Return devices[replica][logical] of the plan."""
    return [list(map(short, own)) for own in devices_by_replica(ar.build_plan(models.item(), config))]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [["CPU:0"], ["CPU:1"], ["CPU:2"], ["CPU:3"]]),
        ({"num_replicas": 4, "computation_shape": [1, 1, 1], "stride": [1, 1, 1]}, [[one] for one in FOUR]),
        ({"computation_shape": [2, 1, 1]}, [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]),
        ({"computation_shape": [1, 2, 1], "num_replicas": 2}, [["CPU:0", "CPU:2"], ["CPU:1", "CPU:3"]]),
        ({"computation_shape": [2, 2, 1]}, [["CPU:0", "CPU:2", "CPU:1", "CPU:3"]]),
        ({"core_assignment": [[[1, 1, 0], [0, 0, 0]]]}, [["CPU:3", "CPU:0"]]),
    ],
)
def test_each_replica_has_the_devices_at_its_places_in_the_topology(given: Any, expected: Any) -> None:
    assert devices_of(assigned(topology=[2, 2, 1], **given)) == expected


def test_strided_replicas_take_every_other_device() -> None:
    config = assigned(topology=[4, 1, 1], computation_shape=[2, 1, 1], stride=[2, 1, 1])
    assert devices_of(config) == [["CPU:0", "CPU:2"], ["CPU:1", "CPU:3"]]


def test_coordinates_are_those_of_tensorflow() -> None:
    from tensorflow.python.tpu.device_assignment import DeviceOrderMode, device_assignment
    from tensorflow.python.tpu.topology import Topology

    compared = 0
    for extents in itertools.product(SIZES, SIZES, (1, 3), (1, 2)):
        coordinates = np.array([list(itertools.product(*map(range, extents)))], np.int32)
        topology = Topology(mesh_shape=np.array(extents, np.int32), device_coordinates=coordinates)
        for shape, stride, count in itertools.product(
            [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 2)], [(1, 1, 1, 1), (2, 1, 1, 1)], (1, 2, 3, 6)
        ):
            try:
                theirs = device_assignment(topology, shape, stride, count, DeviceOrderMode.MESH)
            except ValueError:
                with pytest.raises(ConfigError):
                    assigned(
                        int(np.prod(extents)),
                        topology=extents,
                        computation_shape=shape,
                        stride=stride,
                        num_replicas=count,
                    )
                continue
            given = DeviceAssignment(topology=extents, computation_shape=shape, stride=stride, num_replicas=count)
            assert np.array(replicas_of(given)).tolist() == theirs.core_assignment.tolist()
            compared += 1
    assert compared > 200


def test_a_step_with_a_device_assignment_computes_what_one_device_does_where_it_says() -> None:
    config = {
        "devices": FOUR,
        "device_assignment": {"topology": [2, 2, 1], "computation_shape": [1, 2, 1], "num_replicas": 2},
        "sharding": models.shardings(2),
    }
    new = ar.rewrite(models.item(), config)
    (up, *_) = [one.shards for name, one in new.variables.items() if name == "up0"]
    assert up is not None
    assert [short(device) for device in up.devices[:2]] == ["CPU:0", "CPU:2"]
    assert "Replica 1 has CPU:1, CPU:3." in ar.explain(new)
    report = ar.verify(models.item(), config)
    assert report.ok, report


def test_devices_that_no_replica_has_are_named() -> None:
    plan = ar.build_plan(models.item(), assigned(topology=[2, 2, 1], num_replicas=3))
    assert plan.replicas == 3
    assert any("CPU:3 stay idle" in note for note in plan.notes)


def test_explain_and_the_report_show_the_devices_of_each_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from autograph_rewrite.inspect.report import of_rewrite
    from autograph_rewrite.inspect.report_view import account_of
    from autograph_rewrite.tools.cli import main

    models.item().save(tmp_path / "item.ar")
    given = {"topology": [2, 2, 1], "computation_shape": [2, 1, 1]}
    (tmp_path / "c.yaml").write_text(json.dumps({"devices": FOUR, "device_assignment": given}))
    assert main(["explain", str(tmp_path / "item.ar"), "--config", str(tmp_path / "c.yaml")]) == 0
    assert "Replica 1 has CPU:2, CPU:3." in capsys.readouterr().out
    shown = of_rewrite(account_of(ar.rewrite(models.item(), assigned(**given))))["devices"]
    assert [list(map(short, own)) for own in shown] == [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]


def test_two_workers_have_their_own_replicas() -> None:
    cluster = {"workers": ["127.0.0.1:1", "127.0.0.1:2"]}
    given = {"devices": ["CPU:0", "CPU:1"], "cluster": cluster}
    config = Config.of({**given, "device_assignment": {"topology": [2, 2, 1], "computation_shape": [2, 1, 1]}})
    assert (config.mesh.data, config.mesh.model_size) == (2, 2)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="replicas take the devices of 2 workers in the order"):
        Config.of({**given, "device_assignment": {"topology": [2, 2, 1], "computation_shape": [1, 2, 1]}})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"topology": []}, r"topology: \[\] is no topology"),
        ({"topology": [2, 0]}, r"topology: \[2, 0\] is no topology"),
        ({"topology": 4}, r"device_assignment.topology must be a list"),
        ({"topology": [3, 1]}, r"topology: topology \[3, 1\] has 3 devices, but there are 4"),
        ({"topology": [2, 2], "core_assignment": [[[0, 0, 0]]]}, r"\[0, 0, 0\] has 3 coordinates.*has 2 dimensions"),
        ({"topology": [2, 2], "core_assignment": [[0, 0]]}, r"core_assignment\[0\]\[0\] must be a list"),
        ({"topology": [2, 2], "core_assignment": [[[0, 2]]]}, r"\[0, 2\] is outside of the topology"),
        ({"topology": [2, 2], "core_assignment": [[[0, 0]], [[0, 0]]]}, r"replicas must not overlap"),
        ({"topology": [2, 2], "core_assignment": [[[0, 0]]], "stride": [1, 1]}, r"stride: core_assignment states all"),
        ({"topology": [2, 2], "computation_shape": [1]}, r"computation_shape \[1\] has 1 entries.*has 2 dimensions"),
        ({"topology": [2, 2], "computation_shape": [0, 1], "stride": [1]}, r"stride \[1\] has 1 entries"),
        ({"topology": [2, 2], "computation_shape": [3, 0]}, r"computation_shape \[3, 0\] must be positive"),
        ({"topology": [2, 2], "stride": [1, -1]}, r"stride \[1, -1\] must be positive"),
        ({"topology": [2, 2], "computation_shape": [2, 1], "stride": [2, 1]}, r"a replica covers \[4, 1\], which does"),
        ({"topology": [2, 2], "computation_shape": [2, 1], "num_replicas": 3}, r"3 replicas are asked for, and 2 fit"),
        ({"topology": [2, 2], "num_replicas": 0}, r"num_replicas must be at least 1"),
        ({"mesh_shape": [2, 2]}, r"unknown key 'mesh_shape' in device_assignment"),
    ],
)
def test_an_assignment_that_cannot_be_is_refused_with_its_reason(given: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        assigned(**given)


def test_a_refusal_has_the_line_of_its_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("devices: [CPU:0, CPU:1]\ndevice_assignment:\n  topology: [2, 1]\n  num_replicas: 3\n")
    with pytest.raises(ConfigError, match=f"{path}:4: device_assignment.num_replicas: 3 replicas are asked for"):
        Config.load(path)
    path.write_text("devices: [CPU:0, CPU:1]\nmesh: {data: 2}\ndevice_assignment: {topology: [2, 1]}\n")
    with pytest.raises(ConfigError, match=f"{path}:3: device_assignment and mesh both say"):
        Config.load(path)


def test_stages_are_the_major_part_of_a_replica_s_devices() -> None:
    config = Config.of(
        {
            "devices": FOUR,
            "device_assignment": {"topology": [4, 1], "computation_shape": [4, 1]},
            "pipeline": {"stages": 2, "microbatches": 2},
            "strategy": {"name": "Pipeline"},
        }
    )
    assert (config.mesh.data, config.mesh.model_size) == (1, 2)  # type: ignore[union-attr]
    config.require_usable()
