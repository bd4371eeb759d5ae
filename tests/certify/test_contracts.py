"""The contracts of the certificate, on real kernels: what they accept holds on blocks, and what rules say they accept.

operands, placed in every way ──► which results does the contract accept? ──► run per block ──► the whole's?
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.certify.check_claims import KEEP, SPECIAL, judge_node
from autograph_rewrite.certify.kernels import KERNELS
from autograph_rewrite.certify.seen import Seen, as_read, see
from autograph_rewrite.certify.table import DRAWN, TABLE
from autograph_rewrite.ir.claims import Claim, Claims, Read
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ops.facts.placement import LOCAL, Placement
from autograph_rewrite.ops.rules.base import whole
from autograph_rewrite.ops.rules.table import TABLE as RULES
from autograph_rewrite.passes.base.claims import _as_read
from tests.rules.harness import Case, Operand, check_value, combinations, instances, make_case, op_of
from tests.rules.nodes import node_of
from tests.rules.runner import run, run_once
from tests.rules.sample import Elements, Sample
from tests.rules.samples import SAMPLES

BLOCKS = (2, 2, 1)
FOLDS = {"f": ("sum", "max", "min", "prod"), "i": ("sum", "max", "min", "prod"), "c": ("sum", "prod")}
FOLDS["b"] = ("all", "any")
CHECKED = [sample for sample in SAMPLES if sample.compare == "values"]


def node(case: Case) -> Node:
    """Return the op of a case as a node."""
    return node_of(case.sample.op, [operand.value for operand in case.operands], case.attrs)


def claim_of(operand: Operand, placement: Placement) -> Claim:
    """Return what is claimed of an operand; of what is data, no contents."""
    value, dims = operand.value, operand.value.shape[1:] if operand.is_list else operand.value.shape
    kind, dim, op = placement[:3]
    if operand.states_sizes:
        entries = value.ravel().tolist()
        units = operand.units if placement == LOCAL else (0,) * len(entries)
        contents = tuple((u, ("b",)) if u else v for v, u in zip(entries, units or (0,) * len(entries), strict=True))
        return Claim(kind, 0, "", dims, contents)
    shape = tuple((u, ("b",)) if placement.is_split and d == dim else s for d, (s, u) in _numbered(dims, operand.units))
    return Claim(kind, dim, op, shape, None, operand.zero)


def _numbered(dims: Sequence[int], units: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(zip(dims, units, strict=True))


def result_claim(expected: np.ndarray, placement: Placement | tuple[str, int, str]) -> Claim:
    dims = expected.shape[1:] if isinstance(expected, Elements) else expected.shape
    kind, dim, op = placement[:3]
    return Claim(kind, dim, op, tuple(None if kind == "split" and d == dim else s for d, s in enumerate(dims)))


def options(expected: np.ndarray) -> list[Claim]:
    """Return everything that could be claimed of a result."""
    rank = expected.ndim - isinstance(expected, Elements)
    found = [("replicated", 0, ""), *(("split", d, "") for d in range(rank))]
    found += [("partial", 0, op) for op in FOLDS.get(expected.dtype.kind, ())]
    return [result_claim(expected, one) for one in found]


def accepted(
    node: Node, operands: tuple[Claim, ...], expected: Sequence[np.ndarray], batch: int
) -> Iterator[tuple[Claim, ...]]:
    """Yield all results that the contract accepts for these operands."""

    def judged(*results: Claim) -> str | None:
        return judge_node(Seen(node, operands, results, batch))

    every = [options(one) for one in expected]
    if len(every) > 2:  # a refusal names the first result that is wrong
        for i, some in enumerate(every):
            others = [one[0] for one in every[i + 1 :]]
            made = [one[0] for one in every[:i]]
            every[i] = [one for one in some if not (judged(*made, one, *others) or "").startswith(f"result {i} ")]
            if len(every[i]) != 1:
                return
    yield from (results for results in itertools.product(*every) if judged(*results) is None)


def cases(sample: Sample) -> Iterator[tuple[str, Case, list[np.ndarray]]]:
    for letter in sample.letters:
        case = make_case(sample, letter, BLOCKS)
        yield letter, case, run(sample.op, [operand.value for operand in case.operands], case.attrs)


def name(sample: Sample) -> str:
    return f"{sample}{CHECKED.index(sample)}"


def check_sample(sample: Sample) -> int:
    """Check whatever the contract accepts of a sample; return how much that is."""
    return sum(check_on_blocks(case, expected, node(case)) for _, case, expected in cases(sample))


def check_on_blocks(case: Case, expected: Sequence[np.ndarray], judged: Node) -> int:
    """Run the kernel on whatever the contract accepts; return how often."""
    count = 0
    for placements in combinations(case):
        operands = tuple(claim_of(o, p) for o, p in zip(case.operands, placements, strict=True))
        if not any(claim.differs for claim in operands):
            continue
        held = [instances(o, p, case.blocks) for o, p in zip(case.operands, placements, strict=True)]
        for results in accepted(judged, operands, expected, case.batch):
            made = [run_block(case, [one[k] for one in held]) for k in range(len(case.blocks))]
            for i, claim in enumerate(results):
                if i not in case.sample.undefined:
                    check_value(case, Placement(*claim[:3]), [one[i] for one in made], expected[i], i)
            count += 1
    return count


@pytest.mark.parametrize("sample", CHECKED, ids=name)
def test_what_a_contract_accepts_holds_on_blocks(sample: Sample) -> None:
    for letter, case, expected in cases(sample):
        try:
            check_on_blocks(case, expected, node(case))
        except Exception as error:
            raise AssertionError(f"{sample}: batch is {letter}") from error


def run_block(case: Case, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run the kernel on what one replica holds; a list stays one."""
    pairs = zip(inputs, case.operands, strict=True)
    return run_once(case.sample.op, [a.view(Elements) if o.is_list else a for a, o in pairs], case.attrs)


@pytest.mark.parametrize("sample", CHECKED, ids=name)
def test_what_a_rule_says_its_contract_accepts(sample: Sample) -> None:
    rule = RULES[sample.op]
    for letter, case, expected in cases(sample):
        judged = node(case)
        for placements, dynamic in itertools.product(combinations(case), (True, False)):
            n = op_of(case, placements, dynamic, expected)
            n = n._replace(
                semantics=n.semantics._replace(extent=n.semantics.extent._replace(sizes=None))
            )  # a certificate is about the batch
            placed = rule.place(n)
            if placed is None or placed == whole(n) or placed.decompose:
                continue
            batch = None if dynamic else case.batch
            operands = []
            for i, fact in enumerate(n.inputs):
                claim = Claim(*fact.placement[:3], fact.shape, fact.value, fact.zero)
                operands.append(as_read(claim, _as_read(placed.operand_reshards.get(i)), batch))
            results = [result_claim(one, p) for one, p in zip(expected, placed.outputs, strict=True)]
            if dynamic:
                results = [c._replace(shape=None if c.shape is None else (None,) * len(c.shape)) for c in results]
            problem = judge_node(Seen(judged, tuple(operands), tuple(results), batch))
            assert problem is None, f"{sample}: batch is {letter}, {placements}, dynamic {dynamic}: {problem}"


LOOSE = {
    "Softmax": "@->@",
    "MatMul": "mk,.n->mn|k",
    "Conv2DBackpropFilter": "*,*,n...->....|n",
    "Cumsum": "@,*->@",
    "AvgPoolGrad": "#n...,n...->....|n",
    "LogSoftmax": "@->@",
    "Tanh": "@->@ linear 0",
}
"""Contracts that say too much; the last one is said to be linear."""


@pytest.mark.parametrize("op", LOOSE)
def test_a_contract_that_says_too_much_is_seen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, op, LOOSE[op])  # type: ignore[arg-type]
    with pytest.raises((AssertionError, ValueError, tf.errors.OpError)):
        sum(check_sample(sample) for sample in CHECKED if sample.op == op)


NOT_SAMPLED = {
    "AccumulateNV2": "TensorFlow has removed its kernel",
    "EmptyTensorList": "makes a list of nothing",
    "TensorListReserve": "makes a list of nothing",
    "MatrixExponential": "TensorFlow has removed its kernel",
    "MaxPoolGradGradWithArgmax": "no kernel on the CPU",
    "ResourceGather": "reads a variable",
    "LookupTableFind": "reads a table",
    "LookupTableFindV2": "reads a table",
    "ResourceGatherNd": "reads a variable",
    "TopK": "TensorFlow has removed its kernel",
    **dict.fromkeys(DRAWN, "is drawn at random"),
}


NUMBERS = ("BroadcastArgs", "BroadcastGradientArgs", "ConcatOffset", "InvertPermutation", "Range", "Where")
NOT_SAMPLED |= dict.fromkeys((*NUMBERS, "DynamicStitch"), "makes numbers, or reads them: test_kernels computes it")


def test_every_contract_is_run() -> None:
    known = {*TABLE, *KERNELS} - set(SPECIAL) - KEEP
    assert sorted(known - {sample.op for sample in CHECKED} - set(NOT_SAMPLED)) == []


def test_an_op_without_a_contract_has_to_read_whole_values() -> None:
    unique = node_of("Unique", [np.float32([1, 2])], {})
    results = (Claim("replicated"), Claim("replicated"))
    assert judge_node(Seen(unique, (Claim("replicated", shape=(2,)),), results)) is None
    problem = judge_node(Seen(unique, (Claim("split", shape=((1, ("b",)),)),), results))
    assert problem == "input 0 is split(0), and it has to read all of it"


@pytest.mark.parametrize(("op", "stretches"), [("Mul", True), ("Cross", False)])
def test_blocks_of_what_may_be_a_single_row_are_refused_where_it_would_stretch(op: str, stretches: bool) -> None:
    judged = node_of(op, [np.float32([[1, 2, 3]])] * 2, {})
    blocks = Claim("split", 0, "", ((1, ("b",)), 3))
    for rows in (None, 1, 7, (1, ("B",))):
        operands = blocks, Claim("replicated", 0, "", (rows, 3))
        values = {value.name: claim for value, claim in zip(judged.inputs, operands, strict=True)}
        claims = Claims({**values, judged.output(0).name: blocks}, {(judged.name, 1): Read("split", 0)}, {}, 2)
        right = not stretches or rows == (1, ("B",))
        assert (judge_node(see(judged, claims)) is None) == right, rows


def test_offsets_of_blocks_that_are_cut_along_other_dimensions_are_refused() -> None:
    judged = node_of("ConcatOffset", [np.int32(1), np.int32([3, 5]), np.int32([3, 5])], {"N": 2})
    block = (1, ("b",))
    columns, rows = (Claim("local", shape=(2,), value=value) for value in ((5, block), (block, 5)))
    results = Claim("replicated", shape=(2,), value=(0, 0)), Claim("local", shape=(2,), value=(0, block))
    axis = Claim("replicated", shape=(), value=(1,))
    assert judge_node(Seen(judged, (axis, columns, columns), results)) is None
    assert "which its kernel compares" in (judge_node(Seen(judged, (axis, columns, rows), results)) or "")
