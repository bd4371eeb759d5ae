"""Lookup tables exist once; each replica looks up its own keys, and updates run once."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op
from autograph_rewrite.ops.rules.factors import factors
from autograph_rewrite.ops.rules.signature import every
from autograph_rewrite.ops.traits import ops_with


def _found(n: Op) -> str | None:
    """Keys [k..] and a default value [v..] give [k.., v..], unless one key is a vector: then the rank is another."""
    keys, default, static = n.rank(1), n.rank(2), n.static[0]
    if keys is None or default is None or static is None or len(static) != keys + default:
        return None
    return f"*, ..., * -> ...{' .' * default}"


RULES = every(factors(_found)._replace(pinned=True), *ops_with("table_lookups"))
