"""The cost model against this machine: step times and their order, exchanged bytes and peak memory, on four models.

Each model is distributed in every way that this version can carry out, over two virtual CPU devices, and run in a
Session. The machine is calibrated in the same process; nothing is fitted to the models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from statistics import median
from typing import Any

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_update
from autograph_rewrite.ops.traits import has
from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import interleaved

TITLE = "predicted against measured: 2 virtual CPU devices, Session"
MODELS = {"mlp": ("large", 256), "cnn": ("large", 16), "language_model": ("large", 64), "transformer": ("small", 64)}
"""Zoo entry -> size and total batch."""
OTHERS = {
    "PSLoadBalancing": "shared",
    "PartitionedPS": "mirrored",
    "PartitionedAR": "mirrored",
    "Parallax": "mirrored",
    "FSDP": "mirrored",
}
"""Builders besides AllReduce, and where the other variables live."""
CLEAR = 1.1
"""Step times that differ by less are no order."""
PEAKS = 3
"""Steps of which the peak is taken: which ops overlap differs from one to the next."""


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the numbers that they are made of."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for model in effort.some(list(MODELS)):
        size, batch = MODELS[model]
        arguments = {
            "model": model,
            "size": "tiny" if effort.tiny else size,
            "batch": 4 if effort.tiny else batch,
            "rounds": effort.rounds(15),
            "seconds": effort.seconds(0.2),
            "few": effort.tiny,
        }
        details[model] = found = call("benchmarks.cost:measure", arguments, timeout=900)
        figures += model_figures(model, found)
    taus = [tau(found) for found in details.values()]
    clear = [value for value in taus if value is not None]
    if clear:
        mean = sum(clear) / len(clear)
        figures.append(Figure("order of step times: Kendall's tau, mean of the models", mean, at_least=0.8))
    return figures, details


def model_figures(model: str, found: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """Return how far prediction and measurement are apart."""
    order = tau(found)
    times = ", ".join(
        f"{name} {milliseconds(one['seconds'])} ({milliseconds(one['predicted_seconds'])})"
        for name, one in sorted(found.items(), key=lambda pair: pair[1]["seconds"])
    )
    figures = [Figure(f"{model}: Kendall's tau", 0.0 if order is None else order, how=f"measured (predicted): {times}")]
    for what, limit in (("bytes", 0.01), ("peak", 0.15)):
        errors = {name: _error(one[f"predicted_{what}"], one[what]) for name, one in found.items()}
        worst = max(errors, key=lambda name: errors[name])
        one = found[worst]
        how = f"{worst}: {one[f'predicted_{what}']:,.0f} predicted, {one[what]:,.0f} measured"
        title = "exchanged bytes" if what == "bytes" else "peak memory of the first device"
        figures.append(Figure(f"{model}: {title}, worst error", errors[worst], at_most=limit, how=how))
    return figures


def tau(found: Mapping[str, Mapping[str, float]]) -> float | None:
    """Return Kendall's tau over the pairs whose measured times differ clearly; None without any.

    A pair for which one and the same time was predicted counts for nothing.
    """
    agree = total = 0
    for one, other in combinations(found.values(), 2):
        low, high = sorted((one, other), key=lambda times: times["seconds"])
        if high["seconds"] > CLEAR * low["seconds"]:
            total += 1
            further = high["predicted_seconds"] - low["predicted_seconds"]
            agree += (further > 0) - (further < 0)
    return agree / total if total else None


def _error(predicted: float, measured: float) -> float:
    return abs(predicted - measured) / measured if measured else float(predicted != 0)


def ways(few: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the strategies that this version can carry out, by a name for each."""
    yield "shared", {"name": "AllReduce", "variables": "shared"}
    yield "mirrored", {"name": "AllReduce", "variables": "mirrored"}
    if few:
        return
    yield "mirrored, no buckets", {"name": "AllReduce", "variables": "mirrored", "bucket_bytes": 0}
    for compressor in ("fp16", "topk", "powersgd"):
        yield f"mirrored, {compressor}", {"name": "AllReduce", "variables": "mirrored", "compressor": compressor}
    for name, variables in OTHERS.items():
        yield f"{name}, {variables}", {"name": name, "variables": variables}


def measure(model: str, size: str, batch: int, rounds: int, seconds: float, few: bool) -> dict[str, Any]:
    """Predict and measure every way to distribute a zoo graph (in a child)."""
    import autograph_rewrite as ar
    from autograph_rewrite.cost.hardware.calibrate import calibrate
    from benchmarks import contestants
    from tests.zoo import ZOO

    contestants.split_cpu(2)
    machine = calibrate()
    built = ZOO[model].build(size=size, optimizer="adam", dtype="float32")
    feeds = built.feeds(0, batch)
    item = ar.GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=list(built.outputs),
        init_op=built.init_op,
        batch_inputs=dict(built.batch_inputs),
    )
    found: dict[str, dict[str, float]] = {}
    steps = {}
    for name, strategy in ways(few):
        config = {"devices": ["CPU:0", "CPU:1"], "strategy": strategy}
        new = ar.rewrite(item, config)
        predicted = ar.simulate(item, new.report.plan, batch=batch, machine=machine)
        session = new.session()
        session.run(built.init_op)
        steps[name] = lambda session=session: session.run([*built.outputs, built.train_op], feeds)
        steps[name]()
        found[name] = {
            "predicted_seconds": predicted.step_seconds,
            "predicted_bytes": predicted.moved_bytes,
            "predicted_peak": predicted.devices[0].peak_bytes,
            "bytes": exchanged(traced(new, built, feeds, optimised=False)[0], new),
            "peak": median(allocated(stats, new) for stats in traced(new, built, feeds, PEAKS)) + variable_bytes(new),
        }
    times = interleaved(steps, rounds=rounds, seconds=seconds, warm_up=2)
    for name, one in found.items():
        one["seconds"] = median(times["wall"][name])
    return found


def traced(
    new: Any, built: Any, feeds: Mapping[str, Any], steps: int = 1, *, optimised: bool = True, serial: bool = False
) -> list[Any]:
    """Run steps of one session, and return what TensorFlow noted about every node in each.

    Args:
        new: the rewritten item.
        built: the zoo's graph.
        feeds: of every step.
        steps: how many.
        optimised: whether TensorFlow may fuse and rename nodes.
        serial: nodes run one after another.
    """
    import tensorflow as tf

    from autograph_rewrite.runtime.engine.session import open_session

    v1 = tf.compat.v1
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = not optimised
    config.use_per_session_threads, config.inter_op_parallelism_threads = serial, int(serial)
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    given = {f"{getattr(key, 'name', key).partition(':')[0]}:0": value for key, value in feeds.items()}
    with open_session(new, config=config) as session:
        session.run(built.init_op)
        fetches = [f"{name.partition(':')[0]}:0" for name in built.outputs]
        session.tf_session.run([*fetches, built.train_op], given)  # the first step copies what initialisers share
        found = [v1.RunMetadata() for _ in range(steps)]
        for metadata in found:
            session.tf_session.run([*fetches, built.train_op], given, options=options, run_metadata=metadata)
    return [metadata.step_stats for metadata in found]


def exchanged(stats: Any, new: Any) -> float:
    """Return the bytes that one member of each exchange handed over, by the tensors that there were."""
    from autograph_rewrite.inspect.communication import meetings

    made: dict[str, float] = {}
    for device in stats.dev_stats:
        for node in device.node_stats:
            for output in node.output:
                if output.slot == 0:
                    made.setdefault(node.node_name.partition(":")[0], _tensor_bytes(output.tensor_description))
    total = 0.0
    for one in meetings(new):
        sent = made.get(one.members[0], 0.0)
        is_joined = "Gather" in one.kind or one.kind in ("ConcatV2", "Pack")
        total += sent / (2 if is_joined else 1)
    return total


def _tensor_bytes(description: Any) -> float:
    import tensorflow as tf

    count = 1
    for dim in description.shape.dim:
        count *= dim.size
    return float(count * tf.dtypes.as_dtype(description.dtype).size)


def allocated(stats: Any, new: Any, name: str = "CPU:0") -> float:
    """Return the most bytes beside those of variables that were alive at a time on one device, in the step.

    A variable gives back the memory that it had before, of which this step has no record, when it is assigned; where an
    update found it still read, it has made new memory, and what it had before goes with the last reader.
    """
    graph = new.graph.nodes
    ran = [node for device in stats.dev_stats if device.device.endswith(name) for node in device.node_stats]
    ends = {node.node_name: node.all_start_micros + node.op_end_rel_micros for node in ran}
    changes: list[tuple[int, int]] = []
    for node in ran:
        records = [record for memory in node.memory for record in memory.allocation_records]
        changes += [(record.alloc_micros, record.alloc_bytes) for record in records]
        update, end = graph.get(node.node_name), ends[node.node_name]
        if update is None or not is_update(update):
            continue
        handle = handle_node(update.inputs[0])
        if update.op == "AssignVariableOp":
            changes.append((end, -handle_bytes(handle)))
        elif (kept := sum(record.alloc_bytes for record in records)) > 0:
            changes.append((max([end, *(ends.get(reader, 0) for reader in _readers(handle))]), -kept))
    most = alive = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return float(most)


def _readers(handle: Any) -> Iterator[str]:
    """Yield the names of nodes that read the memory of a variable, or hand it on."""
    pending = [use.node for use in handle_uses(handle) if has(use.node.op, "reads")]
    while pending:
        node = pending.pop()
        yield node.name
        if has(node.op, "views", "reads"):
            pending += [use.node for value in node.read_outputs for use in value.uses]


def variable_bytes(new: Any) -> int:
    """Return the bytes of all variables that the rewritten graph has on the first device."""
    handles = [node for node in new.graph if node.op == "VarHandleOp" and not node.device.endswith("CPU:1")]
    return sum(map(handle_bytes, handles))


def handle_bytes(handle: Any) -> int:
    """Return the bytes of the variable that a node gives the handle of."""
    return dtypes.width(handle.attr("dtype")) * math.prod(handle.attr("shape"))
