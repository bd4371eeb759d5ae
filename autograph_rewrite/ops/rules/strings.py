"""String ops are elementwise; those that split or join texts need replicated operands."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Rule
from autograph_rewrite.ops.rules.elementwise import place_nonlinear, shape_broadcast
from autograph_rewrite.ops.rules.factors import lines

RULES = {
    "StringJoin": Rule(place_nonlinear, shape_broadcast),
    # Texts come first, then parameters.
    **lines("""
... -> ... : AsString StringToNumber StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringLower
    StringUpper StringStrip StringLength RegexReplace RegexFullMatch StaticRegexReplace StaticRegexFullMatch
    EncodeBase64 DecodeBase64 UnicodeScript UnicodeTranscode DecodeCompressed Bucketize
... -> ... . : DecodePaddedRaw
# The length of the rows is that of the texts of the whole batch.
whole : DecodeRaw
whole : ReduceJoin Substr StringSplit StringSplitV2 StringNGrams UnicodeDecode UnicodeEncode UnicodeDecodeWithOffsets
    UnsortedSegmentJoin StringFormat SerializeTensor ParseTensor DecodeJSONExample DecodeCSV DecodeProtoV2 EncodeProto
    ParseExample ParseExampleV2 ParseSingleExample ParseSequenceExample ParseSequenceExampleV2
    ParseSingleSequenceExample
"""),
}
