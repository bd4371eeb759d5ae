"""The codecs of this package, by the names that configurations and plans give them."""

from __future__ import annotations

from collections.abc import Mapping

from autograph_rewrite.codecs.cast16 import Cast16
from autograph_rewrite.codecs.codec import Codec
from autograph_rewrite.codecs.int8 import Int8
from autograph_rewrite.codecs.powersgd import PowerSGD
from autograph_rewrite.codecs.topk import TopK
from autograph_rewrite.ir.types import dtypes

NONE = "none"
BUILTIN: Mapping[str, Codec] = {
    "fp16": Cast16(dtypes.HALF, error_feedback=False),
    "bf16": Cast16(dtypes.BFLOAT16, error_feedback=False),
    "fp16_ef": Cast16(dtypes.HALF, error_feedback=True),
    "bf16_ef": Cast16(dtypes.BFLOAT16, error_feedback=True),
    "topk": TopK(),
    "powersgd": PowerSGD(),
    "int8_ef": Int8(),
}
