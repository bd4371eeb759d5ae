"""The integers by which the members of a collective find each other, the same in every process.

A group key follows from the ordered devices, an instance key from the reduced value and its role. Nothing
depends on call order, so processes that rewrite one graph agree without talking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from autograph_rewrite.plan.devices import canonical

# Keys are int32 inputs of the collectives. Zero is kept free: in a plan it means "not a collective".
KEYS = 2**31 - 1


def group_key(devices: Sequence[str]) -> int:
    """The key of the group of these devices, in this order.

    TensorFlow refuses one key for two device sets ("joining a group that is already full").
    """
    return _stable("group", *(canonical(device) for device in devices)) or 1


def instance_keys(collectives: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """One key for each (value name, role), distinct, whatever order they come in.

    Two values whose hashes meet take neighbouring keys, the lesser name first. Sharing one would let
    TensorFlow pair whichever tensors arrive together.
    """
    keys: dict[tuple[str, str], int] = {}
    taken = {0}
    for value, role in sorted(set(collectives)):
        key = _stable(value, role)
        while key in taken:
            key = (key + 1) % KEYS
        taken.add(key)
        keys[value, role] = key
    return keys


def _stable(*parts: str) -> int:
    """A number below `KEYS` that is the same in every process (unlike `hash`, which is salted)."""
    digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % KEYS
