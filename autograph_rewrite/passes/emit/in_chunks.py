"""Sums and gathers of very many replicas, in chunks of at most 200, as TensorFlow's TPU strategy takes them.

folded     dw/add_n = AddN(all(%dw))
expanded   dw/add_n/chunk_0 = AddN(200 of them), dw/add_n/chunk_1 = ..., dw/add_n = AddN(the chunks)
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.attrs import encode

INPUT_LIMIT = 200
"""How many values one AddN adds up at most, and one ConcatV2 of a gather joins."""
DROPPED = frozenset(("_class", "_output_shapes"))
"""Attributes that no instance has: every node has a device, and shapes were those of the whole batch."""


def in_chunks(node: Node, terms: Sequence[bytes], controls: Sequence[bytes], axis: Sequence[bytes] = ()) -> bytes:
    """Encode an AddN or a ConcatV2 that runs once, of any number of values.

    Args:
        node: the AddN or ConcatV2.
        terms: names of the values.
        controls: what it waits for.
        axis: of a ConcatV2, the name of its axis.
    """
    op = node.op.encode()
    kept = {key: raw for key, raw in node._attrs.items() if key not in ("N", *DROPPED) and isinstance(raw, bytes)}

    def added(name: str, values: Sequence[bytes]) -> bytes:
        attrs = wire.write_attrs(kept | {"N": encode("int", len(values))})
        return wire.write_node(name.encode(), op, [*values, *axis, *controls], node.device.encode(), attrs)

    parts: list[bytes] = []
    level = 0
    while len(terms) > INPUT_LIMIT:
        chunks = [terms[at : at + INPUT_LIMIT] for at in range(0, len(terms), INPUT_LIMIT)]
        names = [f"{node.name}/chunk_{level + at}".encode() for at in range(len(chunks))]
        if axis and len(chunks[-1]) == 1:  # a ConcatV2 joins two at least
            names[-1] = chunks.pop()[0]
        parts += [added(name.decode(), chunk) for name, chunk in zip(names, chunks, strict=False)]
        terms, level = names, level + len(names)
    return b"".join([*parts, added(node.name, terms)])
