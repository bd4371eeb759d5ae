"""Lookup tables exist once; each replica looks up its own keys, and updates run once."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op, Rule
from autograph_rewrite.ops.rules.signature import Signature, axes, every, signed
from autograph_rewrite.ops.traits import ops_with


def _found(n: Op) -> Signature | None:
    """Keys [k..] and a default value [v..] give [k.., v..], unless one key is a vector: then the rank is another."""
    keys, default, static = n.rank(1), n.rank(2), n.static[0]
    if keys is None or default is None or static is None or len(static) != keys + default:
        return None
    labels = axes(keys)
    return Signature((None, labels, None), ((*labels, *[""] * default),))


RULES: dict[str, Rule] = every(signed(_found)._replace(pinned=True), *ops_with("table_lookups"))
