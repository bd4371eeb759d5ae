"""A SavedModel directory as a TrainingGraph: a v1 graph with signatures, or a TF2 signature function.

v1: the MetaGraph is the graph; `init_op` restores the saved variables and runs the initialisers of tables.
TF2: TensorFlow loads the objects; the signature is a function over their variables (this imports TensorFlow).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.serde import from_bytes
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.types.protos import proto
from autograph_rewrite.load.signature.inputs import BatchInputs, describe
from autograph_rewrite.load.signature.references import find_value
from autograph_rewrite.load.sources.graphs import Declared, build_item, read
from autograph_rewrite.load.sources.metagraph import collected
from autograph_rewrite.load.sources.validate import check_file
from autograph_rewrite.training_graph import TrainingGraph

_INTERNAL = frozenset(("__saved_model_init_op", "__saved_model_train_op"))
_MAIN_OPS = ("saved_model_main_op", "legacy_init_op")
_PREFERRED = ("train", "serving_default")


def load_directory(directory: Path, message: Any, signature: str | None, declared: Declared) -> TrainingGraph:
    """Wrap a parsed SavedModel message.

    Args:
        directory: that of the SavedModel.
        message: its `saved_model.pb`, parsed.
        signature: which signature to take; None: the only one.
        declared: what the user says of the graph.

    Raises:
        GraphError: no such signature; the message lists those that there are.
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
    item = build_item(
        graph, collected(meta), train_op=declared.train_op, outputs=given, init_op=restore, batch_inputs=batch_inputs
    )
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
    """Point the saver at the variables beside the graph; return one op that restores and initialises everything."""
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
    """Call inputs and outputs what the signature calls them."""
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
    """Refuse assets that TensorFlow would read from outside of the folder, and what it would wait for inside.

    Raises:
        GraphError: there is one.
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
    """Say that TensorFlow runs ops of the model when it loads it, where it does: they can read and write files."""
    objects = [node for meta in message.meta_graphs for node in meta.object_graph_def.nodes]
    count = sum(child.local_name == "_initialize" for node in objects for child in node.children)
    if count:
        what = f"loading '{directory}' runs its {count} initialisers (of tables, for example)"
        warnings.warn(f"{what}; they can read and write files, so mind whose model it is", stacklevel=4)


def _from_objects(directory: Path, signature: str | None, batch_inputs: BatchInputs | None) -> TrainingGraph:
    import tensorflow as tf

    from autograph_rewrite.load.sources.functions import from_concrete

    try:
        loaded = tf.saved_model.load(str(directory))
    except Exception as error:  # TensorFlow has no type of its own for models that are wrong
        said = next(iter(str(error).splitlines()), "")
        raise GraphError(f"TensorFlow cannot load it ({type(error).__name__}: {said})") from error
    function = _choose(loaded.signatures, signature) if signature in (None, *loaded.signatures) else None
    if function is None:
        raise _unknown(signature or "serving_default", loaded.signatures)
    return from_concrete(function, batch_inputs=batch_inputs, owner=loaded)
