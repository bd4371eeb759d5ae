"""Find the codec that a plan names: one of this package, or a user's with a digest of its code.

    compressor: topk                                  `codecs.builtin`
    compressor: own, own_compressor: sign@3fa9c0d1e2f3     registered in this program, or named by its configuration

A plan never runs code: the program that rewrites with it has registered the same codec.
"""

from __future__ import annotations

import hashlib
import inspect

from autograph_rewrite.codecs.builtin import BUILTIN, NONE
from autograph_rewrite.codecs.codec import Codec
from autograph_rewrite.config.compressor_names import register_compressor, registered_codec
from autograph_rewrite.config.config import Config
from autograph_rewrite.config.strategy_names import own_builder
from autograph_rewrite.config.user_code import blaming, load_module
from autograph_rewrite.errors import ConfigError, PlanError

_AT = "@"


def plan_name(config: Config, name: str, *path: str | int) -> str:
    """Return the name in a plan of a configuration's compressor; register it if it is a class in a file.

    Args:
        path: of the key, for messages.

    Raises:
        ConfigError: its file or class does not exist, or may not run.
    """
    if name == NONE or name in BUILTIN:
        return name
    own = own_builder(name)
    if own is not None:
        name = _load(config.where(*path), *own)
    codec = registered_codec(name)
    assert codec is not None  # checked with the configuration
    return f"{name}{_AT}{code_of(codec)}"


def codec_of(name: str) -> Codec:
    """Return the codec that a plan names.

    Raises:
        PlanError: no codec of this name is registered, or its code differs from when the plan was made.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    own, _, code = name.partition(_AT)
    codec = registered_codec(own)
    if codec is None:
        raise PlanError(
            f"the plan has the compressor '{own}', which is not registered in this program",
            hint=f"call ar.register_compressor({own!r}, codec) first: plans run no code",
        )
    if code not in ("", code_of(codec)):
        raise PlanError(f"the compressor '{own}' has other code than when the plan was made", hint="make it again")
    return codec


def shown(name: str) -> str:
    """Return the name of a compressor for people."""
    return name.partition(_AT)[0]


def code_of(codec: Codec) -> str:
    """Return a digest of a codec's code and settings: workers with others would make another graph."""
    kind = type(codec)
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        text = repr(sorted((name, one.__code__.co_code) for name, one in vars(kind).items() if inspect.isfunction(one)))
    return hashlib.sha256(f"{text}{sorted(vars(codec).items())}".encode()).hexdigest()[:12]


def _load(where: str, file: str, name: str) -> str:
    """Register the class that a configuration names; return its name.

    Raises:
        ConfigError: it does not exist, may not run, or is no codec.
    """
    path, module = load_module(file, where)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{where}: '{path}' has no class '{name}'", hint="it is made without arguments")
    with blaming(f"{where}: the compressor '{name}' of your own has failed", ConfigError):
        codec = found()
    register_compressor(name, codec)
    return name
