"""The collections of a TensorFlow v1 graph: variables, their initializers, train ops, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autograph_rewrite.load.marks import CHECKPOINTS


@dataclass(frozen=True)
class Collected:
    """Facts from collections, all by node name.

    Attributes:
        trainable: handles of trainable variables; None when no collection lists variables.
        initializers: handle -> the op that initialises it.
        train_ops: ops that optimizers registered as train ops.
        update_ops: ops that layers registered to be run with each step.
        keep: nodes that outsiders run besides the step (saver, table initialisers).
        checkpoints: nodes whose values are to be kept where others are computed again.
        policies: handle -> the synchronization and the aggregation that the variable declares.
    """

    trainable: frozenset[str] | None = None
    initializers: Mapping[str, str] = field(default_factory=dict)
    train_ops: tuple[str, ...] = ()
    update_ops: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    policies: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def from_tf_graph(graph: Any) -> Collected:
    """Read the collections of a tf.Graph. Anybody may add to one: entries of unexpected types are ignored."""
    variables = [v for key in ("variables", "local_variables") for v in graph.get_collection(key)]
    trainable = graph.get_collection("trainable_variables")
    initializers = {}
    for variable in (*variables, *trainable):
        initializer = getattr(variable, "initializer", None)
        if initializer is not None and _op_name(variable) is not None:
            initializers[_op_name(variable)] = initializer.name
    return Collected(
        trainable=frozenset(filter(None, map(_op_name, trainable))) if variables or trainable else None,
        initializers=initializers,
        train_ops=_names(graph, "train_op"),
        update_ops=_names(graph, "update_ops"),
        keep=_names(graph, "table_initializer"),
        checkpoints=_names(graph, CHECKPOINTS),
        policies={
            _op_name(variable): (declared(variable, "synchronization"), declared(variable, "aggregation"))
            for variable in (*variables, *trainable)
            if _op_name(variable) is not None
        },
    )


def declared(variable: Any, what: str) -> str:
    """Return what a tf.Variable declares of replicas, in lower case; "" where it leaves that open.

    Args:
        what: "synchronization" or "aggregation".
    """
    name = str(getattr(getattr(variable, what, None), "name", "")).lower()
    return "" if name in ("auto", "none") else name


def _names(graph: Any, collection: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, map(_name, graph.get_collection(collection)))))


def _op_name(variable: Any) -> Any:
    return getattr(getattr(variable, "op", None), "name", None)


def _name(entry: Any) -> str | None:
    name = entry if isinstance(entry, str) else getattr(entry, "name", None)
    return name.partition(":")[0] if isinstance(name, str) else None
