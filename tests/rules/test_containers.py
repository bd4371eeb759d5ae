"""Lists and arrays take the placement of what is put into them, and give it back."""

from __future__ import annotations

import pytest

from autograph_rewrite.ops.facts.placement import Fact, Placement
from autograph_rewrite.ops.facts.symbolic_dims import Sym
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Slice, whole
from autograph_rewrite.ops.rules.join import join
from autograph_rewrite.ops.rules.table import TABLE
from autograph_rewrite.ops.rules.tensor_arrays import element
from tests.rules.facts import ANY, LOCAL, PARTIAL, REPLICATED, B, fact, node, placed, sizes, split

BLOCKS = fact(split(0), B, 3)
SUM = fact(PARTIAL, 5, 3)
ROWS = Sym(1, ("B",))
WHOLE = fact(REPLICATED, ROWS, 3)
INDEX = fact(REPLICATED)
FLOW = fact(REPLICATED)
HANDLE = fact(ANY, cell="array")


@pytest.mark.parametrize("item", [BLOCKS, SUM, WHOLE])
def test_an_empty_list_takes_what_is_put_in(item: Fact) -> None:
    assert placed(node("TensorListPushBack", fact(ANY), item)).outputs == (item.placement,)
    assert placed(node("TensorListSetItem", fact(ANY), INDEX, item)).outputs == (item.placement,)


@pytest.mark.parametrize("rows", [1, 7, None])
def test_what_has_no_blocks_makes_its_list_whole(rows: int | None) -> None:
    n = node("TensorListPushBack", BLOCKS, fact(REPLICATED, rows, 3))
    assert placed(n) == whole(n)


def test_a_new_list_is_empty_and_zero() -> None:
    transferred = placed(node("TensorListReserve", sizes(-1, 3), sizes(4)))
    assert transferred.outputs == (ANY,)
    assert transferred.zero == (True,)


def test_a_list_whose_element_shape_counts_a_block_is_split_from_the_start() -> None:
    assert placed(node("TensorListReserve", sizes(3, B), sizes(4))).outputs == (split(1),)


@pytest.mark.parametrize(
    ("container", "item", "reshard"),
    [
        (BLOCKS, WHOLE, Slice(0, 1)),
        (WHOLE, BLOCKS, REPLICATED),
        (WHOLE, SUM, REPLICATED),
        (SUM, WHOLE, PARTIAL),
        (BLOCKS, fact(split(1), ROWS, B), Slice(0, 1)),
    ],
)
def test_what_is_put_into_a_list_follows_its_elements(container: Fact, item: Fact, reshard: Reshard) -> None:
    transferred = placed(node("TensorListPushBack", container, item))
    assert transferred.outputs == (container.placement,)
    assert dict(transferred.operand_reshards) == {1: reshard}


def test_a_list_of_equal_sizes_keeps_them() -> None:
    push, pop = TABLE["TensorListPushBack"].value, TABLE["TensorListPopBack"].value
    assert push is not None
    assert pop is not None
    empty = fact(ANY)
    assert push(node("TensorListPushBack", empty, sizes(B, 3))) == ((B, 3),)
    assert placed(node("TensorListPushBack", empty, sizes(B, 3))).outputs == (LOCAL,)
    assert placed(node("TensorListPushBack", sizes(B, 3), sizes(B, 3))).outputs == (LOCAL,)
    assert placed(node("TensorListPopBack", sizes(B, 3), sizes(-1), outputs=2)).outputs == (LOCAL, LOCAL)
    assert pop(node("TensorListPopBack", sizes(B, 3), sizes(-1), outputs=2)) == ((B, 3), (B, 3))


def test_a_list_of_other_sizes_or_of_zeros_makes_them_whole() -> None:
    for container in (fact(ANY, zero=True), sizes(5, 3), WHOLE):
        transferred = placed(node("TensorListPushBack", container, sizes(B, 3)))
        assert transferred.outputs == (REPLICATED,)
        assert dict(transferred.operand_reshards) == {1: REPLICATED}
    n = node("TensorListSetItem", fact(ANY), INDEX, sizes(B, 3))
    assert dict(placed(n).operand_reshards) == {2: REPLICATED}


def test_the_element_shape_of_a_list_of_blocks_is_a_size() -> None:
    value = TABLE["TensorListElementShape"].value
    assert value is not None
    assert placed(node("TensorListElementShape", BLOCKS)).outputs == (LOCAL,)
    assert value(node("TensorListElementShape", BLOCKS)) == ((B, 3),)


def test_reading_an_empty_list_gives_zeros() -> None:
    transferred = placed(node("TensorListGetItem", fact(ANY), INDEX, sizes(4, 3)))
    assert transferred.outputs == (REPLICATED,)
    assert placed(node("TensorListGetItem", fact(ANY, zero=True), INDEX, sizes(4, 3))).zero == (True,)


def test_a_static_element_shape_becomes_that_of_a_block() -> None:
    transferred = placed(node("TensorListGetItem", BLOCKS, INDEX, sizes(6, 3)))
    assert dict(transferred.operand_reshards) == {2: LocalEntry(0, B)}


def test_stacking_adds_a_dimension_before_the_split_one() -> None:
    n = node("TensorListStack", BLOCKS, sizes(-1, 3), attrs={"num_elements": 4})
    assert placed(n).outputs == (split(1),)
    shape = TABLE["TensorListStack"].shape
    assert shape is not None
    assert shape(n) == ((4, B, 3),)


def test_a_list_of_the_examples_of_a_batch_is_whole() -> None:
    transferred = placed(node("TensorListFromTensor", BLOCKS, sizes(-1)))
    assert transferred.outputs == (REPLICATED,)
    assert transferred.operand_reshards[0] == REPLICATED


WRITES = [
    ("TensorArrayWriteV3", (HANDLE, INDEX, BLOCKS, FLOW), split(0)),
    ("TensorArrayScatterV3", (HANDLE, sizes(0, 1), fact(split(1), 2, B, 3), FLOW), split(0)),
    ("TensorArraySplitV3", (HANDLE, fact(split(1), 6, B), sizes(2, 4), FLOW), split(1)),
]


@pytest.mark.parametrize(("op", "inputs", "elements"), WRITES)
def test_a_write_says_what_its_array_holds(op: str, inputs: tuple[Fact, ...], elements: Placement) -> None:
    transferred = placed(node(op, *inputs))
    assert transferred.holds is not None
    assert transferred.holds[0] == 0
    assert element(op, inputs[transferred.holds[1]]).placement == elements
    assert transferred.outputs == (PARTIAL,), "each replica has its own array, so its own flow"
    assert dict(transferred.operand_reshards) == {}


def test_a_write_converts_its_value_to_what_the_array_holds() -> None:
    n = node("TensorArrayWriteV3", HANDLE, INDEX, WHOLE, FLOW, cells={0: BLOCKS})
    assert dict(placed(n).operand_reshards) == {2: Slice(0, 1)}
    n = node("TensorArrayWriteV3", HANDLE, INDEX, BLOCKS, FLOW, cells={0: WHOLE})
    assert dict(placed(n).operand_reshards) == {2: REPLICATED}
    stacked = fact(REPLICATED, 2, ROWS, 3)
    n = node("TensorArrayScatterV3", HANDLE, sizes(0, 1), stacked, FLOW, cells={0: BLOCKS})
    assert dict(placed(n).operand_reshards) == {2: Slice(1, 1)}


def test_unstacking_the_batch_makes_the_array_whole() -> None:
    n = node("TensorArrayScatterV3", HANDLE, fact(REPLICATED, None), BLOCKS, FLOW)
    transferred = placed(n)
    assert element(n.op, BLOCKS).placement == REPLICATED
    assert dict(transferred.operand_reshards) == {2: REPLICATED}
    assert transferred.outputs == (REPLICATED,)


def test_a_read_gives_what_the_array_holds() -> None:
    read = node("TensorArrayReadV3", HANDLE, INDEX, FLOW, cells={0: BLOCKS})
    assert placed(read).outputs == (split(0),)
    gather = node("TensorArrayGatherV3", HANDLE, sizes(0, 1), FLOW, cells={0: BLOCKS})
    assert placed(gather).outputs == (split(1),)
    shape = TABLE["TensorArrayGatherV3"].shape
    assert shape is not None
    assert shape(gather) == ((2, B, 3),)


def test_an_array_that_holds_nothing_yet_reads_as_zeros() -> None:
    transferred = placed(node("TensorArrayReadV3", HANDLE, INDEX, FLOW))
    assert transferred.outputs == (REPLICATED,)
    assert transferred.zero == (True,)


def test_all_writes_of_an_array_are_joined() -> None:
    assert join([fact(REPLICATED, ROWS, 3, zero=True), BLOCKS], None).placement == split(0)
    assert join([fact(REPLICATED, None, 3, zero=True), BLOCKS], None).placement == REPLICATED
    assert join([BLOCKS, fact(split(0), Sym(2, ("b",)), 3)], None).shape == (None, 3)
    assert join([SUM, BLOCKS], None).placement == REPLICATED


def test_a_stack_passes_on_what_is_pushed_and_gives_it_back() -> None:
    push = placed(node("StackPushV2", HANDLE, BLOCKS))
    assert push.outputs == (split(0),)
    assert push.holds == (0, 1)
    assert placed(node("StackPopV2", HANDLE, cells={0: BLOCKS})).outputs == (split(0),)


def test_lengths_are_the_same_everywhere() -> None:
    for op in ("TensorListLength", "TensorArraySizeV3"):
        transferred = placed(node(op, BLOCKS, FLOW))
        assert transferred.outputs == (REPLICATED,)
        assert dict(transferred.operand_reshards) == {}


def test_elements_put_end_to_end_make_their_array_whole() -> None:
    cells = (BLOCKS, fact(split(1), 3, B))
    rows, columns = (node("TensorArrayConcatV3", HANDLE, FLOW, outputs=2, cells={0: cell}) for cell in cells)
    assert placed(rows).holds == (0, 1)
    assert join([BLOCKS, element("TensorArrayConcatV3", FLOW)], None).placement == REPLICATED
    assert placed(columns).holds is None
    assert placed(columns).outputs == (split(1), REPLICATED)
