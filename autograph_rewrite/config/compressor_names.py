"""Define the values of `compressor`: a codec of this package, a registered one, or a user's `path/to/file.py:Class`.

register_compressor("sign", Sign())          compressor: sign
compressor: path/to/sign.py:Sign      runs only where that is allowed
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, WithJsonSchema

from autograph_rewrite.codecs.codec import Codec
from autograph_rewrite.config.strategy_names import known_or_own
from autograph_rewrite.errors import ConfigError

Compressor = Literal["none", "fp16", "bf16", "fp16_ef", "bf16_ef", "topk", "powersgd", "int8_ef"]
KNOWN: tuple[str, ...] = get_args(Compressor)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_REGISTERED: dict[str, Codec] = {}


def register_compressor(name: str, codec: object) -> None:
    """Let configurations name a codec from now on; replace a codec of the same name.

    Raises:
        ConfigError: the name is invalid or one of this package's, or the object is no codec.
    """
    if not _NAME.fullmatch(name) or name in KNOWN:
        problem = "a compressor of this package" if name in KNOWN else "no name of a compressor"
        raise ConfigError(f"'{name}' is {problem}", hint="write another name of letters and digits, as in sign_ef")
    if not isinstance(codec, Codec):
        hint = "derive its class from autograph_rewrite.codecs.codec.Codec, and register an instance"
        raise ConfigError(f"the compressor '{name}' is {type(codec).__name__}, which is no codec", hint=hint)
    _REGISTERED[name] = codec


def unregister_compressor(name: str) -> None:
    """Forget a codec; do nothing if there is none of this name."""
    _REGISTERED.pop(name, None)


def registered_codec(name: str) -> Codec | None:
    """Return a registered codec; None if there is none of this name."""
    return _REGISTERED.get(name)


def _known(name: str) -> str:
    return known_or_own(name, [*KNOWN, *_REGISTERED])


CompressorName = Annotated[
    str,
    Field(strict=True),
    AfterValidator(_known),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": list(KNOWN)}, {"type": "string"}]}),
]
