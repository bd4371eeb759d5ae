"""What the generic test cannot see: variables, randomness, batch normalisation, and what must not stay split."""

from __future__ import annotations

import itertools

import pytest

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import Extent, Fact
from autograph_rewrite.ops.facts.symbolic_dims import Sym
from autograph_rewrite.ops.rules.base import LocalEntry, Semantics, Slice, whole
from autograph_rewrite.ops.rules.marked import MARK, STATISTICS
from autograph_rewrite.ops.rules.signature import Signature, place, shapes
from autograph_rewrite.ops.rules.table import TABLE
from tests.rules.facts import PARTIAL, REPLICATED, B, fact, node, placed, sizes, split

IMAGES = fact(split(0), B, 4, 4, 3)
VECTOR = fact(REPLICATED, 3)
HANDLE = Fact(REPLICATED, dtypes.RESOURCE, (50, 8))


def test_an_update_reads_the_whole_gradient() -> None:
    n = node("ResourceApplyAdam", HANDLE, HANDLE, HANDLE, *[fact(REPLICATED)] * 6, fact(PARTIAL, 50, 8), outputs=0)
    assert dict(placed(n).operand_reshards) == {9: REPLICATED}


def test_a_sparse_update_gathers_indices_and_values() -> None:
    n = node("ResourceScatterAdd", HANDLE, fact(split(0), B), fact(split(0), B, 8), outputs=0)
    assert dict(placed(n).operand_reshards) == {1: REPLICATED, 2: REPLICATED}


def test_a_read_has_the_shape_of_its_variable() -> None:
    shape, value = TABLE["ReadVariableOp"].shape, TABLE["VariableShape"].value
    assert shape is not None
    assert value is not None
    assert shape(node("ReadVariableOp", HANDLE)) == ((50, 8),)
    assert value(node("VariableShape", HANDLE)) == ((50, 8),)


@pytest.mark.parametrize("batch_dims", [0, 1])
def test_a_variable_is_gathered_from_by_split_indices(batch_dims: int) -> None:
    n = node("ResourceGather", HANDLE, fact(split(0), B, 7), attrs={"batch_dims": batch_dims})
    assert placed(n).outputs == ((REPLICATED,) if batch_dims else (split(0),))
    shape = TABLE["ResourceGather"].shape
    assert shape is not None
    assert shape(n) == ((B, 7, 8) if not batch_dims else (B, 7),)


def test_a_captured_handle_does_not_hide_the_shape_of_its_variable() -> None:
    handle = Fact(REPLICATED, dtypes.RESOURCE, ())
    read, gather = TABLE["ReadVariableOp"].shape, TABLE["ResourceGather"].shape
    assert read is not None
    assert gather is not None
    assert read(node("ReadVariableOp", handle, static=((50, 8),))) == ((50, 8),)
    n = node("ResourceGather", handle, fact(split(0), B), attrs={"batch_dims": 0}, static=((None, 8),))
    assert placed(n).outputs == (split(0),)
    assert gather(n) == ((B, 8),)


def test_a_variable_is_gathered_from_by_split_index_rows() -> None:
    n = node("ResourceGatherNd", HANDLE, fact(split(0), B, 1))
    assert placed(n).outputs == (split(0),)


def test_de_duplication_gathers_the_rows_of_a_sparse_gradient() -> None:
    n = node("UnsortedSegmentSum", fact(split(0), B, 8), fact(REPLICATED, None), sizes(5))
    assert placed(n) == whole(n)


def test_a_sparse_gradient_made_dense_is_partial() -> None:
    n = node("UnsortedSegmentSum", fact(split(0), B, 8), fact(split(0), B), sizes(50))
    assert placed(n).outputs == (PARTIAL,)


@pytest.mark.parametrize("op", ["RandomUniform", "RandomStandardNormal", "TruncatedNormal", "StatelessRandomUniformV2"])
def test_exact_randomness_is_drawn_once(op: str) -> None:
    assert TABLE[op].pinned
    transferred = placed(node(op, sizes(B, 3)))
    assert transferred.outputs == (REPLICATED,)
    assert dict(transferred.operand_reshards) == {0: REPLICATED}


def test_independent_randomness_is_drawn_by_block() -> None:
    independent = Semantics(random="independent")
    assert placed(node("RandomUniform", sizes(3, B), semantics=independent)).outputs == (split(1),)
    assert placed(node("RandomUniform", sizes(6, 3), semantics=independent)).outputs == (REPLICATED,)
    assert placed(node("RandomShuffle", IMAGES, semantics=independent)).outputs == (REPLICATED,)


NORM = {"is_training": True, "data_format": b"NHWC"}


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_batch_normalisation_is_rewritten_in_training(mode: str) -> None:
    semantics = Semantics(batch_norm=mode)
    n = node("FusedBatchNormV3", IMAGES, *[VECTOR] * 4, outputs=6, attrs=NORM, semantics=semantics)
    assert placed(n).decompose
    inputs = (IMAGES, IMAGES, *[VECTOR] * 4)
    n = node("FusedBatchNormGradV3", *inputs, outputs=5, attrs=NORM, semantics=semantics)
    assert placed(n).decompose


def test_batch_normalisation_of_blocks_gives_contributions_to_the_statistics() -> None:
    attrs = NORM | {MARK: STATISTICS.encode()}
    n = node("FusedBatchNormV3", IMAGES, *[VECTOR] * 4, outputs=6, attrs=attrs)
    assert not placed(n).decompose
    assert placed(n).outputs == (split(0), *[PARTIAL] * 5)
    statistics = fact(PARTIAL, 3)
    inputs = (IMAGES, IMAGES, VECTOR, statistics, statistics, statistics)
    n = node("FusedBatchNormGradV3", *inputs, outputs=5, attrs=attrs)
    assert placed(n).outputs == (split(0), PARTIAL, PARTIAL, REPLICATED, REPLICATED)
    assert dict(placed(n).operand_reshards) == {}


def test_batch_normalisation_of_a_batch_that_is_not_split_is_left_alone() -> None:
    n = node("FusedBatchNormV3", fact(REPLICATED, 8, 4, 4, 3), *[VECTOR] * 4, outputs=6, attrs=NORM)
    assert not placed(n).decompose


def test_a_convolution_gradient_rewrites_a_constant_input_shape() -> None:
    n = node("Conv2DBackpropInput", sizes(6, 4, 4, 3), fact(REPLICATED, 2, 2, 3, 2), fact(split(0), B, 4, 4, 2))
    assert dict(placed(n).operand_reshards) == {0: LocalEntry(0, B)}


@pytest.mark.parametrize("op", ["SpaceToBatchND", "BatchToSpaceND", "CropAndResize", "CTCLoss", "Unique", "Where"])
def test_what_mixes_examples_runs_whole(op: str) -> None:
    n = node(op, IMAGES, VECTOR, outputs=2)
    assert placed(n) == whole(n)


ROWS = Signature((("n", "c"), ("n", "")), (("n", "c"),), frozenset("c"), linear=(0,))


def test_a_whole_operand_is_sliced_to_its_peer_s_rows() -> None:
    n = node("X", fact(split(0), B, 3), fact(REPLICATED, None, 2))
    assert dict(place(n, ROWS).operand_reshards) == {1: Slice(0, 1)}


def test_blocks_of_unknown_size_are_not_taken_for_aligned() -> None:
    n = node("X", fact(split(0), None, 3), fact(split(0), None, 2))
    assert place(n, ROWS) == whole(n)


def test_an_operand_split_along_another_dimension_is_cut_anew() -> None:
    n = node("X", fact(split(0), B, 3), fact(split(1), 6, B))
    assert dict(place(n, ROWS).operand_reshards) == {1: Slice(0, 1)}


def test_sums_pass_only_where_the_op_is_linear_and_nothing_else_is_a_sum() -> None:
    for first, second in itertools.product((PARTIAL, REPLICATED), repeat=2):
        n = node("X", fact(first, 5, 3), fact(second, 5, 2))
        passes = first == PARTIAL and second == REPLICATED
        assert (place(n, ROWS).outputs == (PARTIAL,)) is passes


def test_an_output_without_the_split_dimension_is_whole_unless_it_is_summed_over() -> None:
    kept = Signature((("n", "c"),), (("c",),))
    n = node("X", fact(split(0), B, 3))
    assert place(n, kept) == whole(n)
    assert place(n, kept._replace(summed=frozenset("n"))).outputs == (PARTIAL,)


def test_shapes_come_from_the_labels() -> None:
    n = node("X", fact(split(0), B, 3), fact(split(0), B, 2), static=((6, 3),))
    assert shapes(n, ROWS) == ((B, 3),)


@pytest.mark.parametrize(("op", "attrs"), [("BatchMatMulV2", {}), ("Einsum", {"equation": b"...ij,...jk->...ik"})])
def test_an_operand_of_unknown_size_is_not_cut_where_it_may_stretch(op: str, attrs: dict[str, bytes]) -> None:
    blocks = fact(split(0), B, 2, 3)
    known, single = fact(REPLICATED, Sym(1, ("B",)), 3, 4), fact(REPLICATED, 1, 3, 4)
    assert dict(placed(node(op, blocks, known, attrs=attrs)).operand_reshards) == {1: Slice(0, 1)}
    assert dict(placed(node(op, blocks, single, attrs=attrs)).operand_reshards) == {}
    for rows in (None, 7):  # of an open batch, which may have one example
        n = node(op, blocks, fact(REPLICATED, rows, 3, 4), attrs=attrs)
        assert placed(n) == whole(n)


def test_transforms_of_unknown_number_are_not_cut_since_there_may_be_one_for_all_images() -> None:
    parameters = sizes(4, 4), fact(REPLICATED)
    known, unknown = fact(REPLICATED, Sym(1, ("B",)), 8), fact(REPLICATED, None, 8)
    n = node("ImageProjectiveTransformV3", IMAGES, known, *parameters)
    assert dict(placed(n).operand_reshards) == {1: Slice(0, 1)}
    n = node("ImageProjectiveTransformV3", IMAGES, unknown, *parameters)
    assert placed(n) == whole(n)


def test_a_batch_that_is_stated_as_one_example_stretches_to_the_rows_of_another_operand() -> None:
    one = Semantics(extent=Extent(units=1))
    n = node("Mul", fact(split(0), B, 3), fact(REPLICATED, 5, 3), semantics=one)
    assert placed(n) == whole(n)
    n = node("Mul", fact(split(0), B, 3), fact(REPLICATED, 1, 3), semantics=one)
    assert placed(n).outputs == (split(0),)


def test_offsets_are_those_of_blocks_only_where_all_pieces_are_cut_alike() -> None:
    value = TABLE["ConcatOffset"].value
    assert value is not None
    rows, columns = sizes(B, 5), sizes(5, B)
    assert value(node("ConcatOffset", sizes(0), rows, rows)) == ((0, 0), (B, 0))
    assert value(node("ConcatOffset", sizes(0), rows, columns)) is None
    assert value(node("ConcatOffset", sizes(1), columns, rows)) is None
    assert value(node("ConcatOffset", sizes(1), rows, sizes(7, 5))) == ((0, 0), (0, 5))  # a constant: no kernel runs


def test_a_dimension_that_must_match_is_cut_though_its_size_is_unknown() -> None:
    blocks, unknown = fact(split(0), B, 3), fact(REPLICATED, None, 4)
    assert dict(placed(node("MatMul", blocks, unknown, attrs={"transpose_a": True})).operand_reshards) == {
        1: Slice(0, 1)
    }
    n = node("Einsum", blocks, unknown, attrs={"equation": b"bi,bj->ij"})
    assert dict(placed(n).operand_reshards) == {1: Slice(0, 1)}


@pytest.mark.parametrize(("op", "expected"), [("FloorDiv", -4), ("TruncateDiv", -3), ("Div", -3)])
def test_a_division_of_integers_is_rounded_as_the_op_rounds_it(op: str, expected: int) -> None:
    value = TABLE[op].value
    assert value is not None
    assert value(node(op, sizes(-7), sizes(2))) == ((expected,),)
