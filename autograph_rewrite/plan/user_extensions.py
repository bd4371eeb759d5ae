"""Register passes and ops of a user: by the program, or by a configuration that names them as `file.py:function`.

    register_pass("fold-bias", fold_bias, after="propagate")
    passes: [{file: my_pass.py:fold_bias, after: propagate}]          runs only where that is allowed
    (`config.user_code`)

A plan names them, with a digest of their code. It never runs code: the program that rewrites with it has registered
them.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import AFTER
from autograph_rewrite.config.user_code import load_module
from autograph_rewrite.diagnostics.faults import did_you_mean, either
from autograph_rewrite.errors import ConfigError, PlanError
from autograph_rewrite.ops.rules import registered
from autograph_rewrite.ops.rules.registered import OpEntry
from autograph_rewrite.ops.rules.table import TABLE
from autograph_rewrite.plan.parts.messages import OwnOp, OwnPass
from autograph_rewrite.training_graph import TrainingGraph

PassFunction = Callable[[Any], None]
"""A pass: it is called with the `passes.base.rewriting.Rewrite` under way."""
_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+){0,100}")
_REGISTERED: dict[str, tuple[PassFunction, str]] = {}
_LOADED: dict[str, PassFunction] = {}
"""Passes that configurations have named: only plans that name them run them."""


def register_pass(name: str, function: PassFunction, *, after: str) -> None:
    """Run a function as a pass in every rewrite of this process from now on; replace a pass of the same name.

    Args:
        name: in words with hyphens, as in `fold-bias`.
        function: is called with the rewrite under way, and edits its graph.
        after: the pass after which it runs.

    Raises:
        ConfigError: the name is no name of a pass, or no user's pass can run after that pass.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"'{name}' is no name of a pass", hint="write words with hyphens, as in fold-bias")
    if after not in AFTER:
        raise ConfigError(f"nothing of one's own runs after '{after}'", hint=did_you_mean(after, AFTER, noun="choose"))
    if not callable(function):
        raise ConfigError(f"the pass '{name}' is {type(function).__name__}, which cannot be called")
    _REGISTERED[name] = function, after


def unregister_pass(name: str) -> None:
    """Stop running a pass; do nothing if there is none of this name."""
    _REGISTERED.pop(name, None)
    _LOADED.pop(name, None)


def registered_passes() -> tuple[str, ...]:
    """Return the names of the passes that this process knows: registered, or named by a configuration."""
    return tuple({**_REGISTERED, **_LOADED})


def own_passes(config: Config) -> tuple[OwnPass, ...]:
    """Return the registered passes, and register those that a configuration names.

    Raises:
        ConfigError: a file or function does not exist, or may not run.
    """
    named = [(_load(config, i, one.file), one.after) for i, one in enumerate(config.passes)]
    own = [OwnPass(name, after, code_of(_LOADED[name])) for name, after in named]
    others = [(name, *one) for name, one in _REGISTERED.items() if name not in dict(named)]
    return (*(OwnPass(name, after, code_of(function)) for name, function, after in others), *own)


def function_of(one: OwnPass) -> PassFunction:
    """Return the function of a plan's pass.

    Raises:
        PlanError: no pass of this name is registered, or its code differs from when the plan was made.
    """
    known = [_LOADED.get(one.name), _REGISTERED.get(one.name, (None, ""))[0]]
    functions = [function for function in known if function is not None]
    if not functions:
        raise PlanError(
            f"the plan has the pass '{one.name}', which is not registered in this program",
            hint=f"call ar.register_pass({one.name!r}, function, after={one.after!r}) first: plans run no code",
        )
    same = [function for function in functions if one.code in ("", code_of(function))]
    if not same:
        raise PlanError(
            f"the pass '{one.name}' has other code than when the plan was made",
            hint="make the plan again: its edges are those of the graph that the pass left",
        )
    return same[0]


def code_of(function: PassFunction) -> str:
    """Return a digest of a function's code: workers with other code would make another graph."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = repr(getattr(getattr(function, "__code__", None), "co_code", type(function).__name__))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _load(config: Config, i: int, named: str) -> str:
    """Keep the function that a configuration names; return the name of its pass."""
    where = config.where("passes", i, "file")
    file, _, function = named.rpartition(":")
    path, module = load_module(file, where)
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"{where}: '{path}' has no function '{function}'", hint="it is called with the rewrite")
    name = function.strip("_").lower().replace("_", "-")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: '{function}' makes no name of a pass", hint=either(["fold_bias", "fold"]))
    _LOADED[name] = found
    return name


# Custom ops of the user: described in the program, or in a file that a configuration names.
#
#     register_op("Scaled", factors="n d, d -> n d", linear=(0, 1))
#     ops: [{file: my_ops.py}]          runs only where that is allowed (`config.user_code`)
#
# A plan names those that its graph has, with a digest of the description of each.


def register_op(entry: OpEntry) -> None:
    """Divide an op by an entry in every rewrite of this process from now on; replace an entry of the same name.

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
        ConfigError: a file does not exist, may not run, or fails.
    """
    for i, one in enumerate(config.ops):
        load_module(one.file, config.where("ops", i, "file"))


def own_ops(item: TrainingGraph, config: Config) -> tuple[OwnOp, ...]:
    """Return the registered ops that a graph has, after the files of a configuration have registered theirs.

    Raises:
        ConfigError: a file does not exist, may not run, or fails.
    """
    load_ops(config)
    return tuple(_registered(item))


def _registered(item: TrainingGraph) -> Iterator[OwnOp]:
    ops = {node.op for node in item.graph.nodes.values()}
    return (OwnOp(name, entry.code) for name, entry in sorted(registered.registered().items()) if name in ops)


def problems(named: tuple[OwnOp, ...], item: TrainingGraph) -> Iterator[tuple[str, str]]:
    """Yield the faults of the ops that a plan names, with hints."""
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
