"""Samples of gathers, scatters, segment sums and ops along one dimension."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.rules.sample import Draw, Sample, Sizes, known

F32 = np.float32


def _rows(table: str, axis: int, indices: str, stays: str, batch_dims: int = 0) -> Sample:
    """Gather along `axis` of a table with indices of their own shape."""

    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        shape = [d[x] for x in table]
        index = r.ints(1 + (shape[axis] - 1) // 2, *(d[x] for x in indices))
        return [r(*shape), index, known(axis)]

    letters = "".join(sorted({*table, *indices}))
    return Sample("GatherV2", letters, make, {"batch_dims": batch_dims}, stays)


def _nd_indices(d: Sizes, r: Draw, high: int, depth: int, letters: str) -> np.ndarray:
    return r.ints(high, *(d[x] for x in letters), depth)


GATHERS = [
    _rows("vh", 0, "ij", "hij"),
    _rows("vh", 0, "v", "vh"),
    _rows("vh", 0, "jv", "vhj"),
    _rows("avh", 1, "ij", "ahij"),
    _rows("avh", -1, "i", "avi"),
    _rows("avh", 1, "ai", "ahi", batch_dims=1),
    _rows("aevh", 2, "aei", "aehi", batch_dims=2),
    _rows("aevh", 2, "ai", "aehi", batch_dims=1),
    _rows("avh", 1, "ai", "ahi", batch_dims=-1),
    Sample("Gather", "vhi", lambda d, r: [r(d["v"], d["h"]), r.ints(2, d["i"])], {}, "hi", sizes={"v": 3}),
    Sample("GatherNd", "ihk", lambda d, r: [r(3, d["k"], d["h"]), _nd_indices(d, r, 2, 1, "i")], {}, "i", "hk"),
    Sample("GatherNd", "ijh", lambda d, r: [r(3, 2, d["h"]), _nd_indices(d, r, 2, 2, "ij")], {}, "ij", "h"),
    Sample("GatherNd", "i", lambda d, r: [r(3, 2), _nd_indices(d, r, 2, 2, "i")], {}, "i"),
    *(
        Sample("OneHot", "ab", lambda d, r: [r.ints(4, d["a"], d["b"]), known(4), r(), r()], {"axis": axis}, "ab")
        for axis in (-1, 0, 1, 2)
    ),
    Sample("OneHot", "k", lambda d, r: [r.ints(4, 3), known(d["k"]), r(), r()]),
]


def _scattered(op: str, depth: int, letters: str, rest: str, stays: str) -> Sample:
    """Dimensions behind the indexed ones stay split where no block is empty."""

    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        behind = [d[x] for x in rest]
        indices = _nd_indices(d, r, 2, depth, letters)
        updates = r(*(d[x] for x in letters), *behind)
        if op == "ScatterNd":
            return [indices, updates, known([3, 2][:depth] + behind)]
        table = np.asarray(np.round(r(*[3, 2][:depth], *behind)))
        if op == "TensorScatterUpdate":
            updates = np.zeros_like(updates)  # the order of equal indices must not matter
        return [table, indices, updates]

    return Sample(op, letters + rest, make, {}, stays, rest)


SCATTERS = [
    _scattered("ScatterNd", 1, "i", "h", "i"),
    _scattered("ScatterNd", 2, "ij", "h", "ij"),
    _scattered("ScatterNd", 1, "i", "", "i"),
    Sample("ScatterNd", "k", lambda d, r: [r.ints(1, 3, 1), r(3), known([d["k"]])]),
    *(
        _scattered(f"TensorScatter{kind}", depth, "i", "h", "")
        for kind in ("Update", "Add", "Sub", "Min", "Max")
        for depth in (1, 2)
    ),
]


def _unsorted(op: str, ids: str, rest: str, stays: str) -> Sample:
    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        shape = [d[x] for x in ids]
        return [r(*shape, *(d[x] for x in rest)), r.ints(3, *shape), known(3)]

    return Sample(op, ids + rest, make, {}, stays)


def _sorted_ids(r: Draw, count: int) -> np.ndarray:
    return np.sort(r.ints(2, count)) if count else r.ints(2, 0)


def _sparse(op: str) -> Sample:
    grad, numbered = op.endswith("Grad"), op.endswith("NumSegments")

    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        data = [r(2, d["h"]), r.ints(2, 3), np.asarray([0, 0, 1], np.int32)]
        return [*data, known(4)] if grad or numbered else data

    return Sample(op, "h", make, {}, "h")


SEGMENTS = [
    *(_unsorted("UnsortedSegmentSum", *shapes) for shapes in (("a", "h", "ah"), ("ae", "h", "aeh"), ("a", "", "a"))),
    *(_unsorted(f"UnsortedSegment{kind}", "a", "h", "h") for kind in ("Max", "Min", "Prod")),
    *(
        Sample(f"Segment{kind}", "ah", lambda d, r: [r(d["a"], d["h"]), _sorted_ids(r, d["a"])], {}, "h")
        for kind in ("Sum", "Mean", "Max", "Min", "Prod")
    ),
    *(
        _sparse(f"SparseSegment{kind}{suffix}")
        for kind in ("Sum", "Mean", "SqrtN")
        for suffix in ("", "WithNumSegments", "Grad")
    ),
    Sample("DenseBincount", "a", lambda d, r: [r.ints(3, d["a"], 4), known(3), r(d["a"], 4)], {}, "a"),
    Sample("DenseBincount", "a", lambda d, r: [r.ints(3, d["a"], 4), known(3), r(0)], {"binary_output": True}, "a"),
    Sample("DenseBincount", "a", lambda d, r: [r.ints(3, d["a"]), known(3), r(d["a"])], {}, "a"),
    Sample("DenseBincount", "a", lambda d, r: [r.ints(3, d["a"]), known(3), r(0)], {"binary_output": True}, "a"),
    Sample("Bincount", "a", lambda d, r: [r.ints(3, d["a"]), known(3), r(0)], {}, "a"),
    Sample("Bincount", "ac", lambda d, r: [r.ints(3, d["a"], d["c"]), known(3), r(d["a"], d["c"])], {}, "ac"),
    Sample("HistogramFixedWidth", "ac", lambda d, r: [r(d["a"], d["c"]), np.array([-1.0, 1.0]), known(3)], {}, "ac"),
]


def _along(op: str, axis: int, **attrs: Any) -> Sample:
    letters = "abc"
    stays = letters.replace(letters[axis], "")
    return Sample(op, letters, lambda d, r: [r(d["a"], d["b"], d["c"]), known(axis)], attrs, stays)


def _reversed(steps: int, batch: int) -> Sample:
    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        return [r(d["a"], d["b"], d["c"]), r.ints(d["abc"[steps]], d["abc"[batch]], low=0)]

    attrs = {"seq_dim": steps, "batch_dim": batch}
    return Sample("ReverseSequence", "abc", make, attrs, "abc".replace("abc"[steps], ""))


ORDERINGS = [
    *(_along(op, axis) for op in ("ArgMax", "ArgMin") for axis in (0, 1, -1)),
    *(_along(op, axis) for op in ("Cumsum", "Cumprod", "CumulativeLogsumexp") for axis in (0, 1, -1)),
    _along("Cumsum", 1, exclusive=True, reverse=True),
    Sample("TopKV2", "ab", lambda d, r: [r(d["a"], d["b"], 4), known(2)], {}, "ab"),
    Sample("TopKV2", "b", lambda d, r: [r(4, 5), known(min(d["b"], 5))]),
    Sample("NthElement", "ab", lambda d, r: [r(d["a"], d["b"], 4), known(1)], {}, "ab"),
    _reversed(1, 0),
    _reversed(0, 1),
    _reversed(2, 1),
    Sample("Roll", "abc", lambda d, r: [r(d["a"], d["b"], d["c"]), known([1, 2]), known([1, -1])], {}, "a"),
    Sample("Roll", "ab", lambda d, r: [r(d["a"], d["b"]), known(1), known(0)], {}, "b"),
    *(
        Sample(op, "a", lambda d, r: [np.sort(r(d["a"], 5)), r(d["a"], 3)], {}, "a")
        for op in ("LowerBound", "UpperBound")
    ),
]  # fmt: skip

SAMPLES = [*GATHERS, *SCATTERS, *SEGMENTS, *ORDERINGS]

VARIABLE = "reads a variable: see the tests of gathers"
NOT_RUN = {
    "ResourceGather": VARIABLE,
    "ResourceGatherNd": VARIABLE,
    "TopK": "its kernel asks for an attribute that the op does not have (TensorFlow 2.21)",
    **dict.fromkeys((f"Segment{kind}V2" for kind in ("Sum", "Max", "Min", "Prod")), "only XLA has a kernel"),
}
