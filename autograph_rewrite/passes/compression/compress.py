"""Compress gradients for their exchange, as their edges say: encode, exchange, decode, with any codec.

    before   %dw: partial(sum) ──► sum ──► update
    after    %dw + residual ──► code ──► exchange ──► decode ──► update             residual := what was not sent

A compressed value is a sum that belongs to a variable, dense and of a fixed shape (`resolve.compression`). The codec
says what is sent, the edge's lowering how: codes are added, or gathered and decoded one by one. If ordinary ops add
them up and nothing is sent, members may decode first. The gradients of a bucket are one vector to the codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autograph_rewrite.codecs.codec import Code, Codec, Gradient, wire_word
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.report import CompressedSum
from autograph_rewrite.passes.collectives.all_gather import vectors_of_members
from autograph_rewrite.passes.collectives.all_reduce import contribution, sum_of_members
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.wire_values import Packing, cast
from autograph_rewrite.passes.compression.compressor_state import AuxiliaryVariable, auxiliary_name, residual_of
from autograph_rewrite.plan.codecs import codec_of, shown
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.compression import GATHERS, role_of, shape_of


def reduce_compressed(exchanges: Sequence[Exchange], values: Sequence[Value], name: str) -> list[Value]:
    """Return the sums of gradients that members send compressed.

    Args:
        exchanges: one for each gradient.
        values: the original values: one, or those of a bucket.
        name: prefix of the names of new nodes.

    Raises:
        PassError: the plan's compressor does not fit one of them.
    """
    exchange, rewrite = exchanges[0], exchanges[0].rewrite
    codec, pairs = codec_of(exchange.planned.compressor), list(zip(exchanges, values, strict=True))
    for one, value in pairs:
        _require_fit(one, value, codec)
    packing = Packing(rewrite, values, name)
    sent = [contribution(one, rewrite.current(value), rewrite.fact(value), one.of_members) for one, value in pairs]
    total = before = packing.join(sent)
    build = FoldedBuilder.of(rewrite, total, name, origin=values[0].node)
    residuals: list[AuxiliaryVariable] = []
    if codec.error_feedback:
        residuals = [
            residual_of(rewrite, full, rewrite.fact(value), one.planned)
            for full, (one, value) in zip(sent, pairs, strict=True)
        ]
        before = packing.join([one.before for one in residuals])
        total = build.op("AddV2", total, before, what="total")
    owner = rewrite.item.variables.get(exchange.planned.owner)
    shape = shape_of(rewrite.fact(values[0]), owner) if len(values) == 1 else packing.shape
    wide = wire_types.wire_type(rewrite.fact(values[0]).dtype, "sum")
    state = {
        what: AuxiliaryVariable(rewrite, auxiliary_name(exchange.planned.owner, what), kept, wide, near=sent[0])
        for what, kept in codec.state(shape).items()
    }
    gradient = Gradient(total, shape, wide, exchange.members, {what: one.before for what, one in state.items()})
    found = exchange_codes(exchange, codec, gradient, build)

    sums = [found.total]
    if len(values) > 1 or exchange.planned.lowered.does(Operation.GATHER) or not codec.elementwise:
        sums = packing.split(found.total, found.total)
    afters: list[Value] = []
    if found.own is not None:
        own = found.own
        if not codec.elementwise:
            own = build.op("Reshape", own, build.numbers(list(packing.shape), "shape"), what="own_whole")
        rest = build.op("Sub", total, own, what="rest")
        rest = build.op("SelectV2", build.op("IsFinite", rest, what="keeps"), rest, before, what="residual")
        afters = packing.split(rest, rest) if len(values) > 1 else [rest]
    results = []
    for i, (one, value) in enumerate(pairs):
        results.append(cast(rewrite, sums[i], rewrite.fact(value).dtype, f"{value.node.name}/narrow"))
        if residuals:
            residuals[i].becomes(afters[i], results[i])
        seen = sent[i] if one.adds_micro_batches else rewrite.current(value)
        was, becomes = (residuals[i].before, afters[i]) if residuals else (None, None)
        rewrite.compressed.append(CompressedSum(one.planned, seen, was, becomes, results[i]))
    for what, after in codec.update(build, gradient, found.received).items():
        state[what].becomes(after, results[0])
    return results


class Exchanged(NamedTuple):
    """The results of the exchanges of an encoded gradient.

    Attributes:
        total: the decoded sum of all members' codes.
        own: this member's decoded codes; may be None without error feedback.
        received: the result of each exchange of summed codes.
    """

    total: Value
    own: Value | None
    received: tuple[Value, ...]


def exchange_codes(exchange: Exchange, codec: Codec, gradient: Gradient, build: FoldedBuilder) -> Exchanged:
    """Encode a gradient and exchange its codes, in as many rounds as its codec has.

    Args:
        exchange: of the first round.
        gradient: of one member.
        build: adds the nodes of the member.

    Raises:
        PassError: the codec encodes as other types than it declares.
    """
    rewrite, lowered = exchange.rewrite, exchange.planned.lowered
    whole = replace(build, span=rewrite.common_span, name=f"{build.name}/sum")
    received: tuple[Value, ...] = ()
    codes: tuple[Value, ...] = ()
    rounds = codec.rounds(gradient.shape, gradient.dtype)
    for number, said in enumerate(rounds):
        codes = codec.encode_round(build, gradient, received)
        _require_what_is_said(exchange, codes, said)
        if lowered.does(Operation.GATHER):
            every = vectors_of_members(exchange, pack(build, codes, said), build.name)
            total = codec.decode_sum(whole, gradient, unpack(whole, every, said, gradient.members))
            return Exchanged(total, _own(codec, build, gradient, codes), ())
        if lowered.is_local and codec.gather_up_to:
            decoded = codec.decode(build, gradient, codes)
            return Exchanged(sum_of_members(exchange, decoded, whole.name), decoded, ())
        total = sum_of_members(_round(exchange, number), codes[0], f"{whole.name}/{role_of(number)}".rstrip("/"))
        is_last = number == len(rounds) - 1
        received = (*received, total if is_last else codec.receive(whole, gradient, total))
    own = _own(codec, build, gradient, (*received[:-1], *codes))
    return Exchanged(codec.decode(whole, gradient, received), own, received)


def _own(codec: Codec, build: FoldedBuilder, gradient: Gradient, codes: Sequence[Value]) -> Value | None:
    """Return the decoded codes of one member; None without error feedback."""
    if not codec.error_feedback:
        return None
    build = replace(build, name=f"{build.name}/own")
    if codec.adds:
        return codec.decode(build, gradient, codes)
    axis = build.numbers(0, "sender")
    return codec.decode_sum(build, gradient, [build.op("ExpandDims", one, axis, what="sent") for one in codes])


def _round(exchange: Exchange, number: int) -> Exchange:
    """Return the exchange of a round: of the edge of the same value whose role names the round."""
    if not number:
        return exchange
    edge, edges, role = exchange.planned, exchange.rewrite.plan.edges, role_of(number)
    return replace(exchange, edge=next(e for e in edges if (e.value, e.to, e.role) == (edge.value, edge.to, role)))


def _require_what_is_said(exchange: Exchange, codes: Sequence[Value], said: Sequence[Code]) -> None:
    if [one.dtype for one in codes] == [one.dtype for one in said]:
        return
    made, meant = (", ".join(dtypes.dtype_name(one.dtype) for one in many) for many in (codes, said))
    raise PassError(
        f"the compressor '{shown(exchange.planned.compressor)}' encodes as {made}, but says that it sends {meant}",
        hint="let its `codes` name what its `encode` returns",
    )


def _require_fit(exchange: Exchange, value: Value, codec: Codec) -> None:
    rewrite, edge = exchange.rewrite, exchange.planned
    fact = rewrite.fact(value)
    shape = shape_of(fact, rewrite.item.variables.get(edge.owner))
    problem, roles = "", {e.role for e in rewrite.plan.edges if (e.value, e.to) == (edge.value, edge.to)}
    if wire_types.may_change(fact) or fact.placement.op != "sum" or fact.dtype not in dtypes.FLOATING:
        problem = "it is no sum of floats of a fixed shape"
    elif obstacle := codec.obstacle(shape):
        problem = obstacle
    else:
        rounds = len(codec.rounds(shape, wire_types.wire_type(fact.dtype, "sum")))
        sums = ("add_n", *GATHERS) if codec.adds else ("concat",)
        gathers = tuple(GATHERS.values()) if rounds == 1 else ()
        missing = next((role for role in map(role_of, range(1, rounds)) if role not in roles), None)
        if edge.lowering not in (*sums, *gathers):
            problem = f"{edge.lowering} cannot carry that"
        elif missing:
            problem = f"there is no second edge, with role: {missing}"
    if problem:
        raise PassError(
            f"the plan compresses '{edge.value}' by {shown(edge.compressor)}, but {problem}",
            node=value.node,
            hint="set its compressor to none, or delete the plan's edges to have them resolved anew",
        )


# Pack codes to send them: the concatenated bits of several tensors, as words of a type that collectives support.
#
# values float32[k], positions int32[k]   ──►   int32[2 k] ──gather──►  [members, 2 k]  ──►  [members, k], [members, k]


_WORDS = {2: dtypes.HALF, 4: dtypes.INT32}
"""By the bytes of a word, the type in which it is sent."""


def pack(build: FoldedBuilder, tensors: Sequence[Value], codes: Sequence[Code]) -> Value:
    """Return the bits of some tensors as one vector.

    Args:
        tensors: of fixed shapes.
        codes: their types and shapes.
    """
    word = wire_word(codes)
    parts = [_words(build, tensor, code, word, i) for i, (tensor, code) in enumerate(zip(tensors, codes, strict=True))]
    if len(parts) == 1:
        return parts[0]
    return build.op("ConcatV2", *parts, build.numbers(0, "join"), what="sent", N=len(parts))


def unpack(build: FoldedBuilder, every: Value, codes: Sequence[Code], members: int) -> list[Value]:
    """Return the tensors that all members have sent, each with the senders as a first dimension.

    Args:
        every: the concatenated words of all members.
        codes: types and shapes of the tensors of one member.
        members: how many members there are.
    """
    word = wire_word(codes)
    sizes = [-(-code.count * dtypes.width(code.dtype) // word) for code in codes]
    table = build.op("Reshape", every, build.numbers([members, -1], "rows"), what="table")
    if len(codes) == 1:
        return [_tensor(build, table, codes[0], members, 0)]
    axis = build.numbers(1, "columns")
    parts = build.op("SplitV", table, build.numbers(sizes, "sizes"), axis, what="parts", num_split=len(codes)).node
    return [_tensor(build, parts.output(i), code, members, i) for i, code in enumerate(codes)]


def _words(build: FoldedBuilder, tensor: Value, code: Code, word: int, i: int) -> Value:
    """Return the bits of one tensor as a vector of words, the last filled with zeros."""
    width, what = dtypes.width(code.dtype), f"words_{i}"
    flat = build.op("Reshape", tensor, build.numbers([-1], f"{what}_line"), what=f"{what}_flat")
    if code.dtype == _WORDS[word]:
        return flat
    if code.dtype == dtypes.BOOL:  # which Bitcast does not take
        flat = build.op("Cast", flat, what=f"{what}_bytes", DstT=dtypes.UINT8)
    if width < word:
        each = word // width
        missing = build.numbers([[0, -code.count % each]], f"{what}_missing")
        filled = build.op("Pad", flat, missing, what=f"{what}_filled")
        flat = build.op("Reshape", filled, build.numbers([-1, each], f"{what}_each"), what=f"{what}_rows")
    bits = build.op("Bitcast", flat, what=what, type=_WORDS[word])
    return bits if width <= word else build.op("Reshape", bits, build.numbers([-1], f"{what}_all"), what=f"{what}_sent")


def _tensor(build: FoldedBuilder, words: Value, code: Code, members: int, i: int) -> Value:
    """Return the tensors of all members from their words [members, n]."""
    width, word, what = dtypes.width(code.dtype), dtypes.width(words.dtype), f"code_{i}"
    if width > word:
        split = build.numbers([members, -1, width // word], f"{what}_each")
        words = build.op("Reshape", words, split, what=f"{what}_words")
    kind = dtypes.UINT8 if code.dtype == dtypes.BOOL else code.dtype
    found = words if kind == words.dtype else build.op("Bitcast", words, what=what, type=kind)
    if width < word:
        found = build.op("Reshape", found, build.numbers([members, -1], f"{what}_line"), what=f"{what}_flat")
        begin, size = build.numbers([0, 0], f"{what}_begin"), build.numbers([members, code.count], f"{what}_size")
        found = build.op("Slice", found, begin, size, what=f"{what}_sent")
    if kind != code.dtype:
        found = build.op("Cast", found, what=f"{what}_flags", DstT=code.dtype)
    if len(code.shape) == 1:
        return found
    return build.op("Reshape", found, build.numbers([members, *code.shape], f"{what}_shape"), what=f"{what}_all")
