"""Custom ops of the user's own: described in the program, or in a file that a configuration names.

    register_op("Scaled", factors="n d, d -> n d", linear=(0, 1))
    ops: [{file: my_ops.py}]          runs only where that is allowed (`config.user_code`)

A plan names those that its graph has, with a digest of what is said of each.
"""

from __future__ import annotations

from collections.abc import Iterator

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.user_code import find_file, load_module, require_allowed
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ops.rules import registered
from autograph_rewrite.ops.rules.registered import OpEntry
from autograph_rewrite.ops.rules.table import TABLE
from autograph_rewrite.plan.parts.graph_digest import ItemLike
from autograph_rewrite.plan.parts.messages import OwnOp


def register_op(entry: OpEntry) -> None:
    """Divide an op as an entry says in every rewrite of this process from now on; one of the same name takes its place.

    Raises:
        ConfigError: the op has a rule of this package, or the entry is wrong.
    """
    if entry.name in TABLE:
        raise ConfigError(
            f"the op '{entry.name}' has a rule already", hint="docs/ops.md lists it; register the ops of your own"
        )
    registered.register(entry)


def load_ops(config: Config) -> None:
    """Run the files of ops that a configuration names.

    Raises:
        ConfigError: one is not there, may not run, or fails.
    """
    for i, one in enumerate(config.ops):
        where = config.where("ops", i, "file")
        path = find_file(one.file, where)
        require_allowed(path, where)
        load_module(path, where)


def own_ops(item: ItemLike, config: Config) -> tuple[OwnOp, ...]:
    """Return the ops of a graph that are registered, those of a configuration's files among them from now on.

    Raises:
        ConfigError: a file is not there, may not run, or fails.
    """
    load_ops(config)
    return tuple(_registered(item))


def _registered(item: ItemLike) -> Iterator[OwnOp]:
    ops = {node.op for node in item.graph.nodes.values()}
    return (OwnOp(name, entry.code) for name, entry in sorted(registered.registered().items()) if name in ops)


def problems(named: tuple[OwnOp, ...], item: ItemLike) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the ops that a plan names, with what to do."""
    known = {one.name: one.code for one in _registered(item)}
    again = "make the plan again: its edges follow from what is said of the op"
    for one in named:
        if one.name not in known:
            hint = f"call ar.register_op({one.name!r}, factors=...) first: plans run no code"
            yield f"the plan has the op '{one.name}', which is not registered in this program", hint
        elif one.code not in ("", known[one.name]):
            yield f"the op '{one.name}' is described in other words than when the plan was made", again
    for name in sorted(set(known) - {one.name for one in named}):
        yield f"the op '{name}' is registered, and was not when the plan was made", again
