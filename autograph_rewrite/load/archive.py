"""The `.ar` archive: a zip of graph, signature and captured values, without pickle.

    graph.pb         the GraphDef
    manifest.json    inputs, outputs, targets, variables, and which placeholder takes which value
    placements.json  of a graph whose values have some: the values of each placement, in the words of the printed form
    plan.pb          of a rewritten graph: the plan that it was rewritten by
    values/0.npy     what a captured variable or constant held when the item was saved

Equal items give equal bytes.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from autograph_rewrite.diagnostics.files import replacing
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.annotations import Annotation, Annotations, read_annotation
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.load.captures import FunctionBinding, SavedBinding, SavedCapture
from autograph_rewrite.load.graphs import read
from autograph_rewrite.load.inputs import as_list, describe_output, find_node, named_batches
from autograph_rewrite.training_graph import Shards, TensorInfo, TrainingGraph, Variable

FORMAT = "autograph-rewrite graph item"
VERSION = 1
_PLACEMENTS, _PLAN = "placements.json", "plan.pb"
_SMALL, _RATIO = 2**24, 200
"""Bytes of a member that any archive may have, and how many times larger than in the file it may be beyond that."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def save(item: TrainingGraph, path: Path) -> None:
    """Write an item; the file is complete or not there.

    Raises:
        GraphError: it captures something that cannot be written (a table, an iterator), or cannot write there.
    """
    if item.state and item.binding is not None:
        raise GraphError(
            "a distributed function has variables that rewriting added, which live outside of its graph",
            hint="save the original and rewrite it anew; tf.train.Checkpoint(step=step) saves their values",
        )
    binding = saved_binding(item.binding)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "inputs": [asdict(info) for info in item.inputs.values()],
        "outputs": [asdict(info) for info in item.outputs.values()],
        "targets": item.targets,
        "init_op": item.init_op,
        "keep": item.keep,
        "notes": item.notes,
        "variables": [asdict(variable) for variable in item.variables.values()],
    }
    parts = {"graph.pb": item.graph_bytes}
    if binding is not None:
        manifest["function"] = {"inputs": binding.inputs, "outputs": binding.outputs, "captures": []}
        for index, capture in enumerate(binding.captures):
            file = f"values/{index}.npy"
            parts[file] = _array_bytes(capture)
            entry = {"node": capture.node, "name": capture.name, "dtype": capture.dtype, "file": file}
            manifest["function"]["captures"].append(entry)
    if placements := _placements_data(item):
        parts[_PLACEMENTS] = placements
    if plan := _plan_data(item):
        parts[_PLAN] = plan
    parts["manifest.json"] = json.dumps(manifest, indent=1).encode()
    _write(path, parts)


def _write(path: Path, parts: Mapping[str, bytes]) -> None:
    try:
        with replacing(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            for name, data in parts.items():
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
    except OSError as error:
        raise GraphError(f"cannot write the file: {error.strerror}", where=str(path)) from None


def _plan_data(item: TrainingGraph) -> bytes | None:
    if item.report is None:
        return item.plan_bytes
    data: bytes = item.report.plan.to_bytes()
    return data


def _placements_data(item: TrainingGraph) -> bytes:
    names: dict[str, list[str]] = {}
    for name in sorted(item.placements):
        names.setdefault(str(item.placements[name]), []).append(name)
    return json.dumps(names, indent=0, sort_keys=True).encode() if names else b""


def _placements(archive: zipfile.ZipFile) -> Annotations | None:
    if _PLACEMENTS not in archive.namelist():  # of an original, or from an earlier release
        return None
    found: dict[str, Annotation] = {}
    for words, names in dict(json.loads(_member(archive, _PLACEMENTS))).items():
        stated, end = read_annotation(words)
        if words[end:]:
            raise GraphError(f"'{words[end:]}' after a placement means nothing", where=_PLACEMENTS)
        found |= dict.fromkeys(names, stated)
    return found


def saved_binding(binding: Any) -> SavedBinding | None:
    """Return what can be saved of a binding: the values that its captures hold now.

    Raises:
        GraphError: a capture has no value that could be written.
    """
    if binding is None or isinstance(binding, SavedBinding):
        return binding
    if not isinstance(binding, FunctionBinding):
        return None
    captures = []
    for capture in binding.captures:
        holder = capture.variable if capture.variable is not None else capture.value
        dtype = getattr(holder.dtype, "name", holder.dtype)
        if capture.variable is None and dtype in ("resource", "variant"):
            raise GraphError(
                f"the function captures '{capture.node}', a table, iterator or other resource: it cannot be saved"
            )
        captures.append(SavedCapture(capture.node, np.asarray(holder.numpy()), dtype, capture.name))
    return SavedBinding(tuple(captures), binding.inputs, binding.outputs)


def _array_bytes(capture: SavedCapture) -> bytes:
    """Encode an array; what numpy's format lacks (strings, bfloat16, float8) goes as fixed-width bytes."""
    array = capture.value
    if array.dtype == object:
        items = [v if isinstance(v, bytes) else str(v).encode() for v in array.ravel()]
        text = json.dumps({"shape": array.shape, "items": [item.hex() for item in items]})
        array = np.frombuffer(text.encode(), np.uint8)
    elif dtypes.numpy_dtype(dtypes.NUMBERS[capture.dtype]) is None:
        array = array.view(np.dtype(f"u{array.dtype.itemsize}"))
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _array(data: bytes, dtype: str) -> Any:
    array = np.load(io.BytesIO(data), allow_pickle=False)
    if dtype == "string":
        stored = json.loads(array.tobytes())
        items = np.array([bytes.fromhex(item) for item in stored["items"]], object)
        return items.reshape(stored["shape"])
    if dtypes.numpy_dtype(dtypes.NUMBERS[dtype]) is None:
        import ml_dtypes

        return array.view(getattr(ml_dtypes, dtype))
    return array


def load(
    path: Path,
    *,
    train_op: str | Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    init_op: str | None = None,
    batch_inputs: Mapping[str, int | None] | None = None,
) -> TrainingGraph:
    """Read what `save` wrote; names that are given replace those of the file.

    Args:
        path: of the `.ar` file.
        train_op: names of what one step runs.
        outputs: names of tensors to report.
        init_op: name of the initialiser.
        batch_inputs: axis of the examples by input; None: an input has none.

    Raises:
        GraphError: not such a file, from a newer version, or corrupt.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(_member(archive, "manifest.json"))
            if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
                raise GraphError("the file is a zip archive, but not a saved GraphItem")
            if manifest["version"] > VERSION:
                raise GraphError(
                    f"the file has version {manifest['version']}, this release reads up to {VERSION}",
                    hint="update autograph-rewrite",
                )
            data = _member(archive, "graph.pb")
            item = _item(manifest, data, _binding(manifest.get("function"), archive))
            plan = _member(archive, _PLAN) if _PLAN in archive.namelist() else None
            item = replace(item, stated_placements=_placements(archive), plan_bytes=plan)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, AttributeError, zlib.error) as error:
        raise GraphError(f"the file is corrupt or truncated ({error})") from None
    except RecursionError:
        raise GraphError("the file is corrupt: its manifest is nested too deeply") from None
    except (NotImplementedError, RuntimeError) as error:  # compressed or encrypted otherwise than `save` does
        raise GraphError(f"the file cannot be read: {error}") from None
    return _renamed(item, train_op, outputs, init_op, batch_inputs)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of an archive.

    Raises:
        GraphError: it is much larger than what it was compressed to, as no graph is.
    """
    info = archive.getinfo(name)
    if info.file_size > _SMALL and info.file_size > _RATIO * info.compress_size:
        problem = f"'{name}' would take {info.file_size:,} bytes, {info.file_size // max(1, info.compress_size)} times"
        raise GraphError(f"{problem} what the file holds of it")
    return archive.read(info)


def _binding(function: Any, archive: zipfile.ZipFile) -> SavedBinding | None:
    if function is None:
        return None
    captures = tuple(
        SavedCapture(c["node"], _array(_member(archive, c["file"]), c["dtype"]), c["dtype"], c["name"])
        for c in function["captures"]
    )
    return SavedBinding(captures, tuple(function["inputs"]), tuple(function["outputs"]))


def _item(manifest: Any, data: bytes, binding: SavedBinding | None) -> TrainingGraph:
    return TrainingGraph(
        read(data),
        inputs={entry["name"]: TensorInfo(**_tupled(entry)) for entry in manifest["inputs"]},
        outputs={entry["name"]: TensorInfo(**_tupled(entry)) for entry in manifest["outputs"]},
        targets=tuple(manifest["targets"]),
        init_op=manifest["init_op"],
        variables={entry["name"]: _variable(entry) for entry in manifest["variables"]},
        keep=tuple(manifest["keep"]),
        notes=tuple((node, op, text) for node, op, text in manifest.get("notes", ())),
        binding=binding,
    )


def _variable(entry: Mapping[str, Any]) -> Variable:
    return Variable(**_tupled(entry) | {"shards": _shards(entry.get("shards"))})


def _shards(entry: Mapping[str, Any] | None) -> Shards | None:
    if entry is None:
        return None
    return Shards(**_tupled(entry) | {"within": tuple(map(_shards, entry.get("within", ())))})


def _tupled(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


def _renamed(item: TrainingGraph, train_op: Any, outputs: Any, init_op: Any, batch_inputs: Any) -> TrainingGraph:
    graph = item.graph
    changes: dict[str, Any] = {}
    if train_op is not None:
        changes["targets"] = tuple(find_node(graph, one, "train_op").name for one in as_list(train_op))
    if outputs is not None:
        infos = [describe_output(graph, one) for one in as_list(outputs)]
        changes["outputs"] = {info.name: info for info in infos}
    if init_op is not None:
        changes["init_op"] = find_node(graph, init_op, "init_op").name
    if batch_inputs is not None:
        changes["inputs"] = named_batches(item.inputs, batch_inputs)
    return replace(item, **changes) if changes else item
