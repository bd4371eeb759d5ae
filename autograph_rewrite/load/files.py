"""Read graph files: .pb, .pbtxt, .meta, SavedModel directories, .keras models, printed text, and `.ar` archives.

Only a TF2 SavedModel and a Keras model need TensorFlow; the rest is read from protos. Errors name the file.
"""

from __future__ import annotations

import io
import json
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from autograph_rewrite.diagnostics.files import UnfitFileError, read_whole, replacing
from autograph_rewrite.diagnostics.limits import in_time
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format import parser
from autograph_rewrite.ir.format.annotations import Annotation, Annotations, read_annotation
from autograph_rewrite.ir.format.serde import from_bytes
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.protos import Message, proto
from autograph_rewrite.load import graphs, validate
from autograph_rewrite.load.graphs import Declared, build_item, collected, read
from autograph_rewrite.load.inputs import (
    BatchInputs,
    as_list,
    describe,
    describe_output,
    find_node,
    find_value,
    named_batches,
    tensor_name,
)
from autograph_rewrite.load.keras_models import from_file as from_keras_file
from autograph_rewrite.load.validate import check_file
from autograph_rewrite.load.variables import Collected, FunctionBinding, SavedBinding, SavedCapture
from autograph_rewrite.training_graph import Shards, TensorInfo, TrainingGraph, Variable

_SAID = 300
"""The most characters of a parser's message that are shown: it may quote a whole line."""
_ZIPPED = b"PK\x03\x04"
_KINDS = ".keras, .pb, .pbtxt, .meta, .ar, .txt (as `dump --full` prints it), or a SavedModel directory"


def load(path: Path, *, signature: str | None = None, **named: Any) -> TrainingGraph:
    """Read a graph from disk. See `GraphItem.load`.

    Args:
        signature: the signature to load from a SavedModel.
        named: train_op, outputs, init_op, batch_inputs; None: not given.

    Raises:
        GraphError: the file does not exist, is no graph, is corrupt, lacks a name, or takes too long to read.
    """
    with no_garbage_collection():
        return in_time(lambda: _load(path, signature, Declared(**named)), name=str(path), error=GraphError)


def _load(path: Path, signature: str | None, declared: Declared) -> TrainingGraph:
    try:
        if path.is_dir():
            return load_directory(path, _saved_model(path), signature, declared)
        if path.name in ("saved_model.pb", "saved_model.pbtxt"):
            return _load(path.parent, signature, declared)
        data = _content(path)
        if signature is not None:
            raise GraphError("only a SavedModel has signatures", hint="leave out `signature` for this file")
        if path.suffix == ".keras":
            return from_keras_file(path, declared.batch_inputs)
        is_archive = zipfile.is_zipfile(path) or path.suffix == ".ar"
        return load_archive(path, declared) if is_archive else _reader(path)(data, declared)
    except (DecodeError, ValueError, IndexError, KeyError, TypeError) as error:
        raise GraphError(f"the file is corrupt ({str(error)[:_SAID]})", where=str(path)) from error
    except MemoryError:
        raise GraphError("reading it takes more memory than there is", where=str(path)) from None
    except GraphError as error:
        if error.where is None or str(path) not in error.where:
            error.change_where(str(path) if error.where is None else f"{path}: {error.where}")
        raise


def suffix_of(data: bytes) -> str:
    """Return the suffix that fits a file's content, for a graph without a file name."""
    if data.startswith(_ZIPPED):
        return ".ar"
    if not _looks_like_text(data):
        return ".meta" if _is_meta_graph(data) and not _is_graph(data) else ".pb"
    text = data.decode("utf-8", errors="replace")
    if is_printed(text):
        return ".txt"
    return ".meta" if re.search(r"^(?:meta_info_def|graph_def) *\{", text, re.MULTILINE) else ".pbtxt"


def _is_graph(data: bytes) -> bool:
    try:
        validate.check(from_bytes(data))
    except GraphError:
        return False
    return True


def _content(path: Path) -> bytes:
    try:
        data = read_whole(path)
    except FileNotFoundError:
        raise GraphError("there is no such file") from None
    except UnfitFileError as error:
        raise GraphError(str(error.strerror), hint=f"a graph is {_KINDS}") from None
    except OSError as error:
        raise GraphError(f"the file cannot be read: {error.strerror}") from None
    if not data:
        raise GraphError("the file is empty")
    return data


def _reader(path: Path) -> Callable[[bytes, Declared], TrainingGraph]:
    if path.suffix in (".pbtxt", ".txt"):
        return partial(_from_text, name=str(path))
    if path.suffix == ".meta":
        return _from_meta_graph
    if path.suffix == ".pb":
        return _from_binary
    raise GraphError(f"unknown kind of file '{path.suffix}'", hint=f"a graph is {_KINDS}")


def _looks_like_text(data: bytes) -> bool:
    head = data[:512]
    return all(byte >= 0x20 or byte in b"\t\r\n" for byte in head) and any(mark in head for mark in (b"{", b"#"))


def _from_binary(data: bytes, declared: Declared) -> TrainingGraph:
    if _looks_like_text(data):
        raise GraphError("the file holds text, where .pb means a binary GraphDef", hint="name a text GraphDef .pbtxt")
    try:
        graph = read(data)
    except GraphError as error:
        if _is_meta_graph(data):
            raise GraphError("the file is a MetaGraphDef", hint="name it .meta") from None
        if error.node_name is None:
            hint = error.hint or "the file may be truncated, or not be a GraphDef at all"
            raise GraphError(error.problem, hint=hint) from None
        raise
    return build_item(graph, Collected(), declared)


def _is_meta_graph(data: bytes) -> bool:
    try:
        message = proto("MetaGraphDef").FromString(data)
    except DecodeError:
        return False
    return len(message.graph_def.node) > 0


def _from_text(data: bytes, declared: Declared, name: str) -> TrainingGraph:
    text = "" if b"\0" in data else data.decode("utf-8", errors="replace")
    if is_printed(text):
        item = from_printed(text, vars(declared), name)
        validate.check_file(item.graph)
        return item
    graph = _parse_text(data, "GraphDef").SerializeToString(deterministic=True)
    return build_item(read(graph), Collected(), declared)


def _from_meta_graph(data: bytes, declared: Declared) -> TrainingGraph:
    if _looks_like_text(data):
        data = _parse_text(data, "MetaGraphDef").SerializeToString(deterministic=True)
    try:
        known = graphs.collected(proto("MetaGraphDef").FromString(data))
        graph = graphs.graph_bytes(data)
    except (DecodeError, ValueError, IndexError) as error:
        raise GraphError(f"this is not a MetaGraphDef, or it is truncated ({error})") from None
    return build_item(read(graph), known, declared)


def _parse_text(data: bytes, kind: str) -> Message:
    from google.protobuf import text_format

    message: Message = proto(kind)()
    try:
        if b"\0" in data:
            raise GraphError(f"this is not the text form of a {kind}: no text has zero bytes")
        text_format.Parse(data.decode("utf-8"), message)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise GraphError(f"this is not the text form of a {kind}: {str(error)[:_SAID]}") from None
    except RecursionError:
        raise GraphError(f"this is not the text form of a {kind}: it is nested too deeply") from None
    return message


def _saved_model(directory: Path) -> Any:
    binary, text = directory / "saved_model.pb", directory / "saved_model.pbtxt"
    if binary.exists():
        try:
            return proto("SavedModel").FromString(_content(binary))
        except DecodeError as error:
            raise GraphError(f"saved_model.pb is corrupt or truncated ({error})") from None
    if text.exists():
        return _parse_text(_content(text), "SavedModel")
    raise GraphError("the directory holds no saved_model.pb", hint=f"a graph is {_KINDS}")


# Load a SavedModel directory: a v1 graph with signatures, or a TF2 signature function.
#
# v1: the MetaGraph is the graph; `init_op` restores the saved variables and runs the initialisers of tables.
# TF2: TensorFlow loads the objects; the signature is a function over their variables (this imports TensorFlow).


_INTERNAL = frozenset(("__saved_model_init_op", "__saved_model_train_op"))
_MAIN_OPS = ("saved_model_main_op", "legacy_init_op")
_PREFERRED = ("train", "serving_default")


def load_directory(directory: Path, message: Any, signature: str | None, declared: Declared) -> TrainingGraph:
    """Wrap a parsed SavedModel message.

    Args:
        message: its `saved_model.pb`, parsed.
        signature: the signature to load; None: `train`, `serving_default` or the first one.

    Raises:
        GraphError: the signature does not exist; the hint lists all.
    """
    _require_assets_inside(directory, message)
    batch_inputs, outputs = declared.batch_inputs, declared.outputs
    if any(meta.object_graph_def.nodes for meta in message.meta_graphs):
        for meta in message.meta_graphs:
            check_file(from_bytes(meta.graph_def.SerializeToString(deterministic=True)))
        _tell_of_initialisers(directory, message)
        return _from_objects(directory, signature, batch_inputs)
    meta = _choose_meta_graph(message, signature)
    graph = read(meta.graph_def.SerializeToString(deterministic=True))
    chosen = _choose(meta.signature_def, signature) if signature or not (declared.train_op or outputs) else None
    given = list(outputs or ())
    if chosen is not None and not given:
        given = [info.name for info in chosen.outputs.values() if info.name]
    restore = declared.init_op if declared.init_op is not None else _restore_op(graph, meta, directory)
    if chosen is not None and batch_inputs is not None:
        tensors = {key: info.name for key, info in chosen.inputs.items() if info.name}
        batch_inputs = {tensors.get(key, key): axis for key, axis in batch_inputs.items()}
    declared = replace(declared, outputs=given, init_op=restore, batch_inputs=batch_inputs)
    item = build_item(graph, collected(meta), declared)
    return item if chosen is None else _with_signature_names(item, chosen, bool(outputs))


def _signature_names(signatures: Iterable[str]) -> list[str]:
    return sorted(set(signatures) - _INTERNAL)


def _unknown(signature: str, known: Iterable[str]) -> GraphError:
    names = ", ".join(map(repr, _signature_names(known))) or "none"
    return GraphError(f"the SavedModel has no signature '{signature}'", hint=f"signatures: {names}")


def _choose_meta_graph(message: Any, signature: str | None) -> Any:
    if not message.meta_graphs:
        raise GraphError("the SavedModel holds no graph")
    if signature is None:
        training = (m for m in message.meta_graphs if "train" in m.meta_info_def.tags)
        return next(training, message.meta_graphs[0])
    for meta in message.meta_graphs:
        if signature in meta.signature_def:
            return meta
    raise _unknown(signature, (name for meta in message.meta_graphs for name in meta.signature_def))


def _choose(signatures: Mapping[str, Any], wanted: str | None) -> Any:
    if wanted is not None:
        return signatures[wanted]
    names = _signature_names(signatures)
    for name in (*_PREFERRED, *names[:1]):
        if name in names:
            return signatures[name]
    return None


def _restore_op(graph: Graph, meta: Any, directory: Path) -> str | None:
    """Point the saver at the directory's variables; return one op that restores and initialises everything."""
    saver = meta.saver_def
    restore = saver.restore_op_name.partition(":")[0]
    mains = [
        name.partition(":")[0]
        for key in _MAIN_OPS
        if key in meta.collection_def
        for name in meta.collection_def[key].node_list.value
    ]
    if not restore or restore not in graph:
        return mains[0] if mains else None
    prefix = str(directory.resolve() / "variables" / "variables")
    file_name = graph.value(saver.filename_tensor_name).node
    become(file_name, "Const", (), {"dtype": 7, "value": _string(prefix)})
    name = graph.add("NoOp", name="autograph/restore", controls=[graph.node(restore)]).name
    for main in mains:
        if main in graph:
            name = graph.add("NoOp", name="autograph/init", controls=[graph.node(name), graph.node(main)]).name
    return name


def _string(text: str) -> Any:
    tensor = proto("TensorProto")(dtype=7, string_val=[text.encode()])
    tensor.tensor_shape.SetInParent()
    return tensor


def _with_signature_names(item: TrainingGraph, signature: Any, outputs_given: bool) -> TrainingGraph:
    """Rename inputs and outputs as in the signature."""
    tensors = {info.name: key for key, info in sorted(signature.inputs.items()) if info.name}
    inputs = {}
    for key, info in item.inputs.items():
        name = tensors.get(info.tensor, key)
        inputs[name] = describe(name, item.graph.value(info.tensor), info.batch_axis)
    outputs = item.outputs
    if not outputs_given:
        named = {key: info.name for key, info in sorted(signature.outputs.items()) if info.name}
        outputs = {key: describe(key, find_value(item.graph, name, "output")) for key, name in named.items()}
    return replace(item, inputs=inputs, outputs=outputs)


def _require_assets_inside(directory: Path, message: Any) -> None:
    """Refuse assets outside of the folder, and devices and pipes inside, for which TensorFlow would wait.

    Raises:
        GraphError: there is such a file.
    """
    folder = directory.resolve()
    for name in {asset.filename for meta in message.meta_graphs for asset in meta.asset_file_def}:
        if not (folder / "assets" / name).resolve().is_relative_to(folder):
            raise GraphError(
                f"the asset '{name}' lies outside of the SavedModel's folder",
                hint="copy the model with what its links lead to: cp -rL",
            )
    for part in directory.rglob("*"):
        if not part.is_dir() and part.exists() and not part.is_file():
            raise GraphError(f"'{part.relative_to(directory)}' in the SavedModel is a device or a pipe")


def _tell_of_initialisers(directory: Path, message: Any) -> None:
    """Warn if TensorFlow runs ops of the model when it loads it, because they can read and write files."""
    objects = [node for meta in message.meta_graphs for node in meta.object_graph_def.nodes]
    count = sum(child.local_name == "_initialize" for node in objects for child in node.children)
    if count:
        what = f"loading '{directory}' runs its {count} initialisers (of tables, for example)"
        warnings.warn(f"{what}; they can read and write files, so mind whose model it is", stacklevel=4)


def _from_objects(directory: Path, signature: str | None, batch_inputs: BatchInputs | None) -> TrainingGraph:
    import tensorflow as tf

    from autograph_rewrite.load.functions import from_concrete

    try:
        loaded = tf.saved_model.load(str(directory))
    except Exception as error:  # TensorFlow has no error type for malformed models
        said = next(iter(str(error).splitlines()), "")
        raise GraphError(f"TensorFlow cannot load it ({type(error).__name__}: {said})") from error
    function = _choose(loaded.signatures, signature) if signature in (None, *loaded.signatures) else None
    if function is None:
        raise _unknown(signature or "serving_default", loaded.signatures)
    return from_concrete(function, batch_inputs=batch_inputs, owner=loaded)


# Read the printed form of a graph: the output of `dump --full`, or a hand-written case for one pass.
#
#     # output loss = %loss
#     # target %train
#     %x: float32[?,3] = Placeholder()
#     ...
#
# The first comments of `dump` are the signature; names that the caller gives override them.

_NODE = re.compile(r"\s*(%|anchor\s)")
_SIGNATURE = re.compile(
    r"#\s*(?P<kind>input|output|target|init)\s+(?:(?P<name>\S+)\s*=\s*)?%(?P<tensor>[^\s:,]+(?::\d+)?)"
    r"(?:.*,\s*batch axis (?P<axis>-?\d+))?"
)


def is_printed(text: str) -> bool:
    """Return whether a text is the printed form, not a GraphDef in protobuf's text form."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return _NODE.match(next(lines, "")) is not None


def from_printed(text: str, named: Mapping[str, Any], name: str = "text") -> TrainingGraph:
    """Read a graph and the placements of its values.

    Args:
        text: in the format of `ir.format.parser`.
        named: train_op, outputs, init_op and batch_inputs that the caller gives.
        name: of the text in errors.

    Raises:
        GraphError: a line is malformed, or a name is not in the graph.
    """
    found = [match.groupdict() for line in text.splitlines() if (match := _SIGNATURE.match(line.strip()))]
    of = {kind: [one for one in found if one["kind"] == kind] for kind in ("input", "output", "target", "init")}
    said = {
        "train_op": [one["tensor"] for one in of["target"]] or None,
        "outputs": [one["tensor"] for one in of["output"]] or None,
        "init_op": of["init"][0]["tensor"] if of["init"] else None,
        "batch_inputs": {one["tensor"]: None if one["axis"] is None else int(one["axis"]) for one in of["input"]},
    }
    given = {key: value for key, value in named.items() if value is not None}
    graph, placements = parser.read(text, name=name)
    declared = Declared(**{**said, "batch_inputs": said["batch_inputs"] or None, **given})
    item = build_item(graph, Collected(), declared)
    public = {tensor_name(graph.value(one["tensor"])): one["name"] for one in of["output"] if one["name"]}
    outputs = {public.get(info.tensor, key): info for key, info in item.outputs.items()}
    return replace(item, outputs=outputs, stated_placements=placements)


# Read and write the `.ar` archive: a zip of graph, signature and captured values, without pickle.
#
#     graph.pb         the GraphDef
#     manifest.json    inputs, outputs, targets, variables, and which placeholder takes which value
#     placements.json  if placements are known: the values of each placement, as the printed form writes it
#     plan.pb          of a rewritten graph: its plan
#     values/0.npy     the value of a captured variable or constant when the item was saved
#
# Equal items give equal bytes.

FORMAT = "autograph-rewrite graph item"
VERSION = 1
_PLACEMENTS, _PLAN = "placements.json", "plan.pb"
_SMALL, _RATIO = 2**24, 200
"""A member may have this many bytes, or at most this many times its compressed size."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def save(item: TrainingGraph, path: Path) -> None:
    """Write an item; on an error, no file is left.

    Raises:
        GraphError: the item captures something without a value (a table, an iterator), or the file cannot be written.
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
    plan = item.plan_bytes if item.report is None else item.report.plan.to_bytes()
    if plan:
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


def _placements_data(item: TrainingGraph) -> bytes:
    names = grouped((str(item.placements[name]), name) for name in sorted(item.placements))
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
    """Return a binding with the present values of its captures.

    Raises:
        GraphError: a capture has no value that can be written.
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
    """Encode an array; types that numpy's format lacks (strings, bfloat16, float8) are written as integers."""
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


def load_archive(path: Path, declared: Declared) -> TrainingGraph:
    """Read a file that `save` wrote; declared names replace those of the file.

    Raises:
        GraphError: it is another file, has a newer version, or is corrupt.
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
    except (NotImplementedError, RuntimeError) as error:  # encrypted, or compressed by an unknown method
        raise GraphError(f"the file cannot be read: {error}") from None
    return _renamed(item, declared)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of an archive.

    Raises:
        GraphError: it is compressed so much that it can be no graph.
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
    return {key: _tuple(value) for key, value in entry.items()}


def _tuple(value: Any) -> Any:
    """Return nested lists as nested tuples."""
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _renamed(item: TrainingGraph, declared: Declared) -> TrainingGraph:
    graph = item.graph
    changes: dict[str, Any] = {}
    if declared.train_op is not None:
        changes["targets"] = tuple(find_node(graph, one, "train_op").name for one in as_list(declared.train_op))
    if declared.outputs is not None:
        infos = [describe_output(graph, one) for one in as_list(declared.outputs)]
        changes["outputs"] = {info.name: info for info in infos}
    if declared.init_op is not None:
        changes["init_op"] = find_node(graph, declared.init_op, "init_op").name
    if declared.batch_inputs is not None:
        changes["inputs"] = named_batches(item.inputs, declared.batch_inputs)
    return replace(item, **changes)
