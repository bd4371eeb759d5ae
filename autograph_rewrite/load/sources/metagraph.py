"""MetaGraphDef: a GraphDef with collections and a saver, as `tf.train.Saver` and v1 SavedModels write it."""

from __future__ import annotations

from typing import Any

from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.protos import proto
from autograph_rewrite.load.marks import CHECKPOINTS
from autograph_rewrite.load.signature.collections import Collected

_GRAPH_DEF = 2


def graph_bytes(meta_graph: bytes) -> bytes:
    """Return the GraphDef inside an encoded MetaGraphDef, as it stands there.

    Raises:
        ValueError: not a MetaGraphDef.
    """
    for field, kind, _, start, stop in wire.fields(meta_graph):
        if field == _GRAPH_DEF and kind == wire.LENGTH_DELIMITED:
            return meta_graph[start:stop]
    raise ValueError("it holds no graph")


def collected(meta_graph: Any) -> Collected:
    """Return what the collections and the saver of a MetaGraphDef message say."""
    collections = meta_graph.collection_def
    listed = [v for key in ("variables", "local_variables") for v in _variables(collections, key)]
    trainable = _variables(collections, "trainable_variables")
    saver = meta_graph.saver_def
    saver_names = (saver.filename_tensor_name, saver.save_tensor_name, saver.restore_op_name)
    return Collected(
        trainable=frozenset(_node(v.variable_name) for v in trainable) if listed or trainable else None,
        initializers={_node(v.variable_name): _node(v.initializer_name) for v in (*listed, *trainable)},
        train_ops=_nodes(collections, "train_op"),
        update_ops=_nodes(collections, "update_ops"),
        keep=tuple(dict.fromkeys((*map(_node, filter(None, saver_names)), *_nodes(collections, "table_initializer")))),
        checkpoints=_nodes(collections, CHECKPOINTS),
    )


def _variables(collections: Any, key: str) -> list[Any]:
    if key not in collections:
        return []
    return [proto("VariableDef").FromString(raw) for raw in collections[key].bytes_list.value]


def _nodes(collections: Any, key: str) -> tuple[str, ...]:
    if key not in collections:
        return ()
    return tuple(dict.fromkeys(_node(name) for name in collections[key].node_list.value))


def _node(tensor: str) -> str:
    return tensor.partition(":")[0]
