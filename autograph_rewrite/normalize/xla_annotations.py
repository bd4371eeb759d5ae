"""XLA's sharding ops as what they compute on one device: identities, which keep what they say as an attribute.

    before   x ──► XlaSharding(sharding: tiles [1, 2], unspecified_dims [0]) ──► y
    after    x ──► Identity(_XlaSharding: tiles [1, 2], _autograph_open_dims [0]) ──► y

`XlaSpmdFullToShardShape` and `XlaSpmdShardToFullShape` begin and end a region whose ops are written for one shard. That
is no single-device graph, and TensorFlow has no kernel for them outside of XLA.
"""

from __future__ import annotations

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.load.op_sharding import read_op_sharding
from autograph_rewrite.load.sharding_marks import OPEN_DIMS, XLA_SHARDING


def forward_annotated(graph: Graph) -> None:
    """Turn every `XlaSharding` into an `Identity` with its annotation as an attribute.

    Args:
        graph: edited.
    """
    for node in [node for node in graph if node.op == "XlaSharding"]:
        said, unspecified = node.attr("sharding", b""), tuple(node.attr("unspecified_dims", ()))
        node.set_raw_attr(XLA_SHARDING, encode("string", said))
        if unspecified:
            node.set_raw_attr(OPEN_DIMS, encode("list(int)", unspecified))
        become(node, "Identity", node.inputs, {})


def require_automatic(graph: Graph) -> None:
    """Make sure that no part of a graph is written for one shard.

    Raises:
        GraphError: some is, or an annotation is malformed.
    """
    for node in graph:
        if node.op in ("XlaSpmdFullToShardShape", "XlaSpmdShardToFullShape"):
            raise GraphError(
                f"{node.op} switches between whole tensors and the shards of a device (manual partitioning)",
                node=node,
                hint="leave auto_to_manual_spmd_partition and its inverse out: ops on whole tensors are cut for you",
            )
        said = node.attr(XLA_SHARDING)
        if said is None:
            continue
        try:
            is_manual = read_op_sharding(said).is_manual
        except ValueError as error:
            raise GraphError(f"the attribute {XLA_SHARDING} is no OpSharding: {error}", node=node) from None
        if is_manual:
            hint = "annotate it with split, mesh_split or replicate, and let its ops work on whole tensors"
            raise GraphError("the sharding is manual: its ops see the shard of a device", node=node, hint=hint)
