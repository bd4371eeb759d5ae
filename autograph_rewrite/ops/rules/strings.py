"""String ops are elementwise; those that split or join texts need replicated operands."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op, Rule, whole
from autograph_rewrite.ops.rules.elementwise import place_nonlinear, shape_broadcast
from autograph_rewrite.ops.rules.signature import Signature, axes, every, signed


def _texts(n: Op) -> Signature | None:
    """Texts first, then parameters."""
    rank = n.rank(0)
    if rank is None:
        return None
    return Signature((axes(rank),) + (None,) * (len(n.inputs) - 1), (axes(rank),))


def _decoded(n: Op) -> Signature | None:
    """Every text becomes a row of numbers."""
    rank = n.rank(0)
    if rank is None:
        return None
    labels = axes(rank)
    return Signature((labels,) + (None,) * (len(n.inputs) - 1), ((*labels, ""),))


WHOLE = Rule(whole, lambda n: n.static)
TEXTS = signed(_texts)

RULES: dict[str, Rule] = {
    **every(
        TEXTS,
        "AsString StringToNumber StringToHashBucket StringToHashBucketFast StringToHashBucketStrong",
        "StringLower StringUpper StringStrip StringLength RegexReplace RegexFullMatch",
        "StaticRegexReplace StaticRegexFullMatch EncodeBase64 DecodeBase64 UnicodeScript",
        "UnicodeTranscode DecodeCompressed Bucketize",
    ),
    "StringJoin": Rule(place_nonlinear, shape_broadcast),
    **every(signed(_decoded), "DecodePaddedRaw"),
    # The length of the rows is that of the texts of the whole batch.
    "DecodeRaw": WHOLE,
    **every(
        WHOLE,
        "ReduceJoin Substr StringSplit StringSplitV2 StringNGrams UnicodeDecode UnicodeEncode",
        "UnicodeDecodeWithOffsets UnsortedSegmentJoin StringFormat SerializeTensor ParseTensor",
        "DecodeJSONExample DecodeCSV DecodeProtoV2 EncodeProto",
        "ParseExample ParseExampleV2 ParseSingleExample ParseSequenceExample",
        "ParseSequenceExampleV2 ParseSingleSequenceExample",
    ),
}
