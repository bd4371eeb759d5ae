"""Random numbers are drawn once, replicated, and sliced by their readers; or each replica draws its own block.

`random: exact` draws the numbers that one device would draw. `random: independent` lets an op whose shape counts a
block, or whose parameters are split, draw only that block; the lowering gives each replica a different seed.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import local_entry
from autograph_rewrite.ops.rules.base import Op, Placed, Rule, others_whole, whole
from autograph_rewrite.ops.rules.elementwise import split_wants
from autograph_rewrite.ops.rules.factors import factors, lines
from autograph_rewrite.ops.rules.signature import every
from autograph_rewrite.ops.traits import operands, ops_with


def place_shaped(n: Op) -> Placed:
    """Draw by shape: a shape that counts a block draws a block, where randomness is independent."""
    dim = _block_entry(n)
    if n.semantics.random != "independent" or dim is None:
        return whole(n)
    return Placed((split(dim),) * len(n.output_dtypes), others_whole(n, 0))


def _block_entry(n: Op) -> int | None:
    """Return the only entry of the shape operand that counts a block, if there is one."""
    return local_entry(n.value(0)) if n.inputs[0].is_local else None


def shape_shaped(n: Op) -> tuple[Shape | None, ...]:
    """Return the first input, which is the shape."""
    return _stated(n, 0)


def _stated(n: Op, operand: int) -> tuple[Shape | None, ...]:
    """Return the contents of a shape operand as the shape of each output."""
    value = n.value(operand)
    return n.static if value is None else (value,) * len(n.static)


def _by_parameters(n: Op) -> str | None:
    """Draw by parameters: a block of them gives a block of samples, where randomness is independent."""
    rank, count = n.rank(1), n.static[0]
    if n.semantics.random != "independent" or rank is None or count is None or len(count) < rank:
        return None
    return f"*, ... -> {'. ' * (len(count) - rank)}..."


def _by_logits(n: Op) -> str | None:
    """Draw by logits: a block of them gives a block of samples, where randomness is independent."""
    return "b ., * -> b ." if n.semantics.random == "independent" else None


def shape_by_parameters(n: Op) -> tuple[Shape | None, ...]:
    """Return the sample shape, then that of the parameters."""
    sample, parameters = n.value(0), n.shape(1)
    return n.static if sample is None or parameters is None else ((*sample, *parameters),)


def shape_by_logits(n: Op) -> tuple[Shape | None, ...]:
    """Return a row per row of logits, and a column per sample."""
    logits, count = n.shape(0), n.value(1)
    if logits is None or len(logits) != 2:
        return n.static
    columns = count[0] if count is not None and len(count) == 1 else (n.static[0] or (None, None))[1]
    return ((logits[0], columns),)


def place_spread(n: Op) -> Placed:
    """Draw by shape with parameters for each element: as by shape, and the parameters are split like the result."""
    dim, shape = _block_entry(n), n.value(0)
    if n.semantics.random != "independent" or dim is None or shape is None:
        return whole(n)
    parameters = operands(n.op, "random_parameters")
    operand_reshards = split_wants(n, parameters, len(shape), dim, shape[dim])
    if operand_reshards is None or any(n.placement(i).is_partial and i not in operand_reshards for i in parameters):
        return whole(n)
    return Placed((split(dim),), {**operand_reshards, **others_whole(n, 0, *parameters)})


SHAPED = Rule(place_shaped, shape_shaped, pinned=True)
SPREAD = Rule(place_spread, shape_shaped, pinned=True)
DRAWN_WHOLE = Rule(whole, shape_shaped, pinned=True)
PER_PARAMETER = factors(_by_parameters)._replace(shape=shape_by_parameters, pinned=True)
PER_LOGITS = factors(_by_logits)._replace(shape=shape_by_logits, pinned=True)
BY_GENERATOR = Rule(whole, lambda n: _stated(n, 2), pinned=True)  # generator, algorithm, shape

RULES: dict[str, Rule] = {
    **every(
        SHAPED,
        "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal",
        "StatelessRandomUniform StatelessRandomUniformInt StatelessRandomUniformFullInt",
        "StatelessRandomNormal StatelessTruncatedNormal",
        "StatelessRandomUniformV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2",
        "StatelessRandomNormalV2 StatelessTruncatedNormalV2",
    ),
    **every(PER_PARAMETER, "RandomGamma RandomPoissonV2"),
    "Multinomial": PER_LOGITS,
    **every(SPREAD, *ops_with("random_parameters")),
    "StatelessParameterizedTruncatedNormal": DRAWN_WHOLE,
    **every(
        BY_GENERATOR,
        "StatefulUniform StatefulUniformInt StatefulUniformFullInt StatefulStandardNormalV2 StatefulTruncatedNormal",
    ),
    **lines("""
once : RandomShuffle RandomCrop ParameterizedTruncatedNormal StatelessShuffle RandomPoisson StatefulRandomBinomial
    StatefulStandardNormal NonDeterministicInts RngReadAndSkip RngSkip StatelessMultinomial SampleDistortedBoundingBox
    SampleDistortedBoundingBoxV2 StatelessSampleDistortedBoundingBox AnonymousSeedGenerator AnonymousRandomSeedGenerator
    DummySeedGenerator DeleteSeedGenerator DeleteRandomSeedGenerator UniformCandidateSampler LogUniformCandidateSampler
    LearnedUnigramCandidateSampler FixedUnigramCandidateSampler AllCandidateSampler ThreadUnsafeUnigramCandidateSampler
    ComputeAccidentalHits
# A pure function of replicated seeds.
whole : StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg StatelessRandomGetAlg
"""),
}

SHAPES = {
    **{op: 0 for op, rule in RULES.items() if rule in (SHAPED, SPREAD, DRAWN_WHOLE)},
    **{op: 2 for op, rule in RULES.items() if rule is BY_GENERATOR},
}
"""Ops that draw by shape, and the position of the shape operand."""


def is_draw(op: str) -> bool:
    """Return whether an op draws random numbers: its only effect is on the next draw."""
    return op in RULES
