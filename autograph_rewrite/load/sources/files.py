"""Graph files: .pb, .pbtxt, .meta, a SavedModel directory, a .keras model, printed text, and the `.ar` archive.

Only a TF2 SavedModel and a Keras model need TensorFlow itself; the rest is read from protos. An error names the file.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from autograph_rewrite.diagnostics.files import UnfitFileError, read_whole
from autograph_rewrite.diagnostics.time_limit import in_time
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.serde import from_bytes
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.types.protos import Message, proto
from autograph_rewrite.load.signature.collections import Collected
from autograph_rewrite.load.sources import archive, metagraph, validate
from autograph_rewrite.load.sources.graphs import Declared, build_item, read
from autograph_rewrite.load.sources.keras_models import from_file as from_keras_file
from autograph_rewrite.load.sources.printed import from_printed, is_printed
from autograph_rewrite.load.sources.saved_model import load_directory
from autograph_rewrite.training_graph import TrainingGraph

_SAID = 300
"""Characters of what a parser says: it may quote all of a line."""
_ZIPPED = b"PK\x03\x04"
_KINDS = ".keras, .pb, .pbtxt, .meta, .ar, .txt (as `dump --full` prints it), or a SavedModel directory"


def load(path: Path, *, signature: str | None = None, **named: Any) -> TrainingGraph:
    """Read a graph from disk. See `GraphItem.load`.

    Args:
        path: file or directory.
        signature: which one of a SavedModel.
        named: train_op, outputs, init_op, batch_inputs; None: not given.

    Raises:
        GraphError: no such file, not a graph, corrupt or truncated, a name that it does not have, or it takes too long.
    """
    with no_garbage_collection():
        return in_time(lambda: _load(path, signature, named), name=str(path), error=GraphError)


def _load(path: Path, signature: str | None, named: dict[str, Any]) -> TrainingGraph:
    try:
        if path.is_dir():
            return load_directory(path, _saved_model(path), signature, Declared(**named))
        if path.name in ("saved_model.pb", "saved_model.pbtxt"):
            return _load(path.parent, signature, named)
        data = _content(path)
        if signature is not None:
            raise GraphError("only a SavedModel has signatures", hint="leave out `signature` for this file")
        if path.suffix == ".keras":
            return from_keras_file(path, named.get("batch_inputs"))
        is_archive = zipfile.is_zipfile(path) or path.suffix == ".ar"
        return archive.load(path, **named) if is_archive else _reader(path)(data, named)
    except (DecodeError, ValueError, IndexError, KeyError, TypeError) as error:
        raise GraphError(f"the file is corrupt ({str(error)[:_SAID]})", where=str(path)) from error
    except MemoryError:
        raise GraphError("reading it takes more memory than there is", where=str(path)) from None
    except GraphError as error:
        if error.where is not None and str(path) in error.where:
            raise
        where = str(path) if error.where is None else f"{path}: {error.where}"
        raise GraphError(error.problem, node=_Named.of(error), where=where, hint=error.hint) from error


class _Named:
    """The node that an error named, for the error that takes its place."""

    def __init__(self, name: str, op: str) -> None:
        self.name = name
        self.op = op

    @classmethod
    def of(cls, error: GraphError) -> _Named | None:
        return cls(error.node_name, error.node_op or "") if error.node_name is not None else None


def suffix_of(data: bytes) -> str:
    """Return the suffix that a file of this content has, for a graph that comes without a name."""
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


def _reader(path: Path) -> Callable[[bytes, dict[str, Any]], TrainingGraph]:
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


def _from_binary(data: bytes, named: dict[str, Any]) -> TrainingGraph:
    if _looks_like_text(data):
        raise GraphError(
            "the file holds text, where .pb means a binary GraphDef",
            hint="name a text GraphDef .pbtxt",
        )
    try:
        graph = read(data)
    except GraphError as error:
        if _is_meta_graph(data):
            raise GraphError("the file is a MetaGraphDef", hint="name it .meta") from None
        if error.node_name is None:
            hint = error.hint or "the file may be truncated, or not be a GraphDef at all"
            raise GraphError(error.problem, hint=hint) from None
        raise
    return build_item(graph, Collected(), **named)


def _is_meta_graph(data: bytes) -> bool:
    try:
        message = proto("MetaGraphDef").FromString(data)
    except DecodeError:
        return False
    return len(message.graph_def.node) > 0


def _from_text(data: bytes, named: dict[str, Any], name: str) -> TrainingGraph:
    text = "" if b"\0" in data else data.decode("utf-8", errors="replace")
    if is_printed(text):
        item = from_printed(text, named, name)
        validate.check_file(item.graph)
        return item
    return build_item(read(_parse_text(data, "GraphDef").SerializeToString(deterministic=True)), Collected(), **named)


def _from_meta_graph(data: bytes, named: dict[str, Any]) -> TrainingGraph:
    if _looks_like_text(data):
        data = _parse_text(data, "MetaGraphDef").SerializeToString(deterministic=True)
    try:
        known = metagraph.collected(proto("MetaGraphDef").FromString(data))
        graph = metagraph.graph_bytes(data)
    except (DecodeError, ValueError, IndexError) as error:
        raise GraphError(f"this is not a MetaGraphDef, or it is truncated ({error})") from None
    return build_item(read(graph), known, **named)


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
