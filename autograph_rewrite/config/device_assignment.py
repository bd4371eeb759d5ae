"""Assign devices: which of the listed devices is logical device l of replica r, from their places in a topology.

    topology [2, 2, 1]               devices 0 1 2 3 are at (0, 0, 0) (1, 0, 0) (0, 1, 0) (1, 1, 0)
    computation_shape [1, 2, 1]      replica 0: (0, 0, 0) (0, 1, 0)      devices 0 2
    num_replicas 2                   replica 1: (1, 0, 0) (1, 1, 0)      devices 1 3

Devices are numbered as on TPUs: the last dimension (the cores of a chip) counts fastest, then the first, the second and
so on. Replicas are numbered in the same way, so that replica r of one device each is device r.

The coordinates, and the checks in their order, are those of `tf.tpu.experimental.DeviceAssignment.build` with
`DeviceOrderMode.MESH`; the result is a mesh, with the devices in the order of (replica, logical device).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from autograph_rewrite.config.sections import DeviceAssignment, Mesh
from autograph_rewrite.diagnostics.located_yaml import Finding

Coordinates = tuple[int, ...]


def problem_of(given: DeviceAssignment, own: int, stages: int) -> Finding | None:
    """Return the first fault of an assignment, None where there is none.

    Args:
        own: how many devices each process has; 0 where that is not known.
        stages: how many devices in a row hold the stages of a replica.
    """
    return next(_problems(given, own), None) or (next(_layout(given, own, stages), None) if own else None)


def replicas_of(given: DeviceAssignment) -> list[list[Coordinates]]:
    """Return the coordinates of each replica's logical devices.

    Args:
        given: a valid assignment.
    """
    if given.core_assignment is not None:
        return [list(replica) for replica in given.core_assignment]
    shape, stride, counts = shape_of(given), _stride(given), _replica_counts(given)
    count = math.prod(counts) if given.num_replicas is None else given.num_replicas
    inside = list(product(*(range(0, size * step, step) for size, step in zip(shape, stride, strict=True))))
    footprint = [size * step for size, step in zip(shape, stride, strict=True)]
    found = []
    for at in _positions(_arrangement(counts, count), count):
        start = [place // step * size + place % step for place, step, size in zip(at, stride, footprint, strict=True)]
        found.append([tuple(a + b for a, b in zip(start, one, strict=True)) for one in inside])
    return found


def shape_of(given: DeviceAssignment) -> Coordinates:
    """Return the extents of a replica in the topology; by default, one device."""
    return given.computation_shape or (1,) * len(given.topology)


def numbered(given: DeviceAssignment) -> list[list[int]]:
    """Return devices[replica][logical], by their numbers.

    Args:
        given: a valid assignment.
    """
    return [[_number(given.topology, one) for one in replica] for replica in replicas_of(given)]


def of_process(given: DeviceAssignment, own: int) -> list[int]:
    """Return which of its devices a process uses, in the order of (replica, logical device).

    Args:
        given: a valid assignment.
        own: how many devices each process has.
    """
    order = [device for replica in numbered(given) for device in replica]
    return order[: len(order) // (math.prod(given.topology) // own)]


def mesh_of(given: DeviceAssignment, stages: int) -> Mesh:
    """Return the mesh of an assignment; stages are the major part of a replica's logical devices.

    Args:
        given: a valid assignment.
        stages: how many devices in a row hold the stages of a replica.
    """
    replicas = replicas_of(given)
    axes = tuple(size for size in shape_of(given) if size > 1)
    if stages > 1 or len(axes) < 2 or given.core_assignment is not None:
        return Mesh(data=len(replicas), model=len(replicas[0]) // stages)
    return Mesh(data=len(replicas), model=axes)


def _number(topology: Sequence[int], at: Sequence[int]) -> int:
    return int(np.ravel_multi_index((at[-1], *at[:-1]), (topology[-1], *topology[:-1]), order="F"))


def _stride(given: DeviceAssignment) -> Coordinates:
    return given.stride or (1,) * len(given.topology)


def _replica_counts(given: DeviceAssignment) -> list[int]:
    """Return how many replicas fit along each dimension."""
    fit = zip(given.topology, shape_of(given), _stride(given), strict=True)
    return [extent // (size * step) * step for extent, size, step in fit]


def _arrangement(counts: Sequence[int], replicas: int) -> list[int]:
    """Return the number of replicas along each dimension: close to a cube, the most constrained dimension first."""
    rank, found, left = len(counts), [1] * len(counts), replicas
    order = sorted(range(rank), key=lambda dim: (counts[dim], (dim + 1) % rank))
    for done, dim in enumerate(order):
        wanted = math.ceil(left ** (1.0 / (rank - done)))
        found[dim] = min(wanted, counts[dim])
        left = -(-left // found[dim])
    return found


def _positions(arrangement: Sequence[int], replicas: int) -> Iterator[list[int]]:
    """Yield the place of each replica in an arrangement: the last dimension counts fastest, then the first, ..."""
    for replica in range(replicas):
        last, *others = np.unravel_index(replica, (arrangement[-1], *arrangement[:-1]), order="F")
        yield [*map(int, others), int(last)]


def _problems(given: DeviceAssignment, own: int) -> Iterator[Finding]:
    devices = math.prod(given.topology)
    if not given.topology or min(given.topology) < 1:
        hint = "say how many devices there are along each dimension, as in [2, 2, 1]"
        yield Finding(("topology",), f"{list(given.topology)} is no topology", hint)
        return
    if own and devices % own:
        message = f"topology {list(given.topology)} has {devices} devices, but there are {own}"
        yield Finding(
            ("topology",), message, "its dimensions multiply to the number of devices, of all workers together"
        )
        return
    yield from _given_coordinates(given) if given.core_assignment is not None else _shapes(given)


def _layout(given: DeviceAssignment, own: int, stages: int) -> Iterator[Finding]:
    """Check that every process has whole replicas, or an equal share of one, and every replica whole stages."""
    replicas = numbered(given)
    order = [device for replica in replicas for device in replica]
    workers = math.prod(given.topology) // own
    first = order[: len(order) // workers]
    if order != [worker * own + device for worker in range(workers) for device in first] or max(first) >= own:
        message = f"replicas take the devices of {workers} workers in the order {order}, not those of each in its turn"
        yield Finding(
            ("topology",),
            message,
            "let the last but one dimension of the topology count workers, and replicas lie within one",
        )
    if len(replicas[0]) % stages:
        message = f"a replica has {len(replicas[0])} logical devices, which {stages} stages cannot divide"
        yield Finding(("computation_shape",), message, "make it a multiple of pipeline.stages")


def _given_coordinates(given: DeviceAssignment) -> Iterator[Finding]:
    """Check stated coordinates: [replica][logical device][dimension]."""
    rank, replicas = len(given.topology), given.core_assignment or ()
    for key in ("computation_shape", "stride", "num_replicas"):
        if getattr(given, key) is not None:
            yield Finding((key,), "core_assignment states all coordinates, so nothing follows from it", "leave it out")
    if not replicas or not all(replicas) or len({len(one) for one in replicas}) > 1:
        yield Finding(
            ("core_assignment",), "replicas have different numbers of devices, or none", "state as many for each"
        )
    every = [at for replica in replicas for at in replica]
    for at in every:
        if len(at) != rank:
            message = f"{list(at)} has {len(at)} coordinates, and the topology has {rank} dimensions"
            yield Finding(("core_assignment",), message, "state one for each dimension")
        elif any(not 0 <= place < size for place, size in zip(at, given.topology, strict=True)):
            message = f"{list(at)} is outside of the topology {list(given.topology)}"
            yield Finding(("core_assignment",), message, "coordinates count from 0")
    twice = next((at for i, at in enumerate(every) if at in every[:i]), None)
    if twice is not None:
        message = f"the device at {list(twice)} stands twice: replicas must not overlap"
        yield Finding(("core_assignment",), message, "give each its own devices")


def _shapes(given: DeviceAssignment) -> Iterator[Finding]:
    """Check the shape of a replica, its stride, and the number of replicas, in TensorFlow's order."""
    rank = len(given.topology)
    stated = (("computation_shape", given.computation_shape), ("stride", given.stride))
    for key, value in stated:
        if value is not None and len(value) != rank:
            message = f"{key} {list(value)} has {len(value)} entries, and the topology has {rank} dimensions"
            yield Finding((key,), message, "say one for each dimension")
    for key, value in stated:
        if value is not None and min(value) < 1:
            yield Finding((key,), f"{key} {list(value)} must be positive", "its entries begin at 1")
    footprint = [size * step for size, step in zip(shape_of(given), _stride(given), strict=True)]
    if any(size > extent for size, extent in zip(footprint, given.topology, strict=True)):
        message = f"a replica covers {footprint}, which does not fit in the topology {list(given.topology)}"
        yield Finding(("computation_shape",), message, "it covers computation_shape times stride: make either smaller")
    most = math.prod(_replica_counts(given))
    if given.num_replicas is not None and given.num_replicas > most:
        message = f"{given.num_replicas} replicas are asked for, and {most} fit in the topology {list(given.topology)}"
        yield Finding(("num_replicas",), message, "ask for fewer, or make computation_shape or stride smaller")
