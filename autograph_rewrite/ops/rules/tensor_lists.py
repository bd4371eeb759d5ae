"""Tensor lists: the fact of a handle is the fact of its elements (their placement and shape).

Every replica has a list of the same length; if elements are split, each list holds its replica's blocks.
So the dimension that a list adds or removes (stacking) must not be the split one. A list without elements is `ANY`.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import ANY, LOCAL, REPLICATED, Fact, Placement, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import Dim, any_local, is_settled, local_entry
from autograph_rewrite.ops.rules.base import (
    LocalEntry,
    Op,
    Placed,
    Reshard,
    Rule,
    Values,
    first_value,
    like_first,
    made_whole,
    others_whole,
    scalar,
    whole,
)
from autograph_rewrite.ops.rules.join import MISFIT, conform, join, join_shapes
from autograph_rewrite.ops.rules.layout import stated_shape
from autograph_rewrite.ops.rules.signature import every
from autograph_rewrite.ops.rules.sizes import shape_of_shape


def with_leading(placement: Placement) -> Placement:
    """Return the placement of stacked elements."""
    return split(placement.dim + 1) if placement.is_split else placement


PER_EXAMPLE = "one element for each example: a list or array is not cut into blocks, so it holds whole values"


def without_leading(fact: Fact) -> Fact | None:
    """Return the fact of the elements of an unstacked tensor; None where its first dimension is split."""
    if fact.placement == split(0):
        return None
    placement = split(fact.placement.dim - 1) if fact.placement.is_split else fact.placement
    return fact._replace(placement=placement, shape=element_of(fact.shape), value=None)


def element_of(rows: Shape | None) -> Shape | None:
    """Return the shape of one row of a tensor."""
    return rows[1:] if rows else None


def stacked(element: Shape | None, count: Dim = None) -> Shape | None:
    """Return the shape of a stack of `count` elements."""
    return None if element is None else (count, *element)


def element_shape(n: Op, index: int, element: Fact) -> dict[int, Reshard] | None:
    """Return the conversion of the operand that states the elements' shape; None where no conversion makes it fit."""
    operand = n.inputs[index]
    if not element.placement.is_split:
        return made_whole(n, index)
    dim, size = element.placement.dim, element.split_size
    if operand.is_local:
        return {} if local_entry(operand.value) == dim else None
    if operand.placement.differs:
        return None
    if operand.shape == () or (operand.value is not None and operand.value[dim : dim + 1] == (-1,)):
        return {}  # unknown rank, or unknown size
    return None if size is None or operand.shape is None else {index: LocalEntry(dim, size)}


def place_make(n: Op) -> Placed:
    """Make an empty list, which takes the placement of its elements; it is split if its element shape counts a block.

    Reserved elements are zeros; a list without elements is not.
    """
    zero, dim = (n.op == "TensorListReserve",), local_entry(n.value(0))
    if n.inputs[0].is_local and dim is not None:
        return Placed((split(dim),), made_whole(n, 1), zero=zero)
    return Placed((ANY,), others_whole(n), zero=zero)


def _put(n: Op, item: int) -> Placed:
    """Put operand `item` into a list: a list cannot be converted, so the element is, unless the list is empty."""
    container, element, batch = n.inputs[0], n.inputs[item], n.semantics.extent.units
    alike = [fact for fact in (container, element) if fact.placement == container.placement]
    target = join([element] if container.placement == ANY else alike, batch)
    if container.is_local or target.is_local:
        return _put_sizes(n, container)
    reshard = conform(element, target, batch)
    if reshard == MISFIT:
        return whole(n)
    operand_reshards = others_whole(n, 0, item) | ({} if reshard is None else {item: reshard})
    return Placed((target.placement,), operand_reshards, zero=(container.zero and element.zero,))


def _put_sizes(n: Op, container: Fact) -> Placed:
    """Put sizes of blocks into a list: they stay local if all are equal; otherwise they have to be whole."""
    if n.op == "TensorListPushBack" and _pushed_value(n) is not None:
        return Placed((LOCAL,))
    return whole(n) if container.is_local else Placed((REPLICATED,), others_whole(n, 0))


def _element_or_list(n: Op, element: Shape | None) -> Shape | None:
    container = n.inputs[0]
    known = container.placement != ANY and container.shape is not None
    if not known or element is None:
        return element if element is not None else container.shape
    rows = container.split_size
    if container.placement.is_split and not is_settled(rows) and container.placement.dim < len(element):
        rows = element[container.placement.dim]
    return join_shapes([container.shape, element], container.placement, rows)


def _pushed_value(n: Op) -> Values | None:
    """Return the contents of every element if all pushed elements are equal, such as sizes of a loop's values."""
    container, element = n.inputs
    unset = container.placement == ANY and not container.zero
    return (element.value,) if element.value is not None and (unset or container.value == element.value) else None


def place_keep(n: Op) -> Placed:
    """Change the length only; new elements are zeros, so elements that are sizes are no longer equal."""
    if n.inputs[0].is_local:
        return whole(n)
    return Placed((n.placement(0),), others_whole(n, 0), zero=(n.inputs[0].zero,))


def take(n: Op, operand: int, *, stacked: bool) -> Placed | None:
    """Read elements (zeros from an empty list); None where the element shape cannot be converted.

    Args:
        operand: position of the operand that states the elements' shape.
        stacked: read all elements along a new dimension 0, instead of one of them.
    """
    element = n.inputs[0]
    if element.is_local and (stacked or element.value is None):
        return None
    placement = REPLICATED if element.placement == ANY else element.placement
    stated = element_shape(n, operand, element._replace(placement=placement))
    if stated is None:
        return None
    output = with_leading(placement) if stacked else placement
    return Placed((output,), others_whole(n, 0, operand) | stated, zero=(element.zero,))


def place_get(n: Op) -> Placed:
    """Read one element."""
    return take(n, 2, stacked=False) or whole(n)


def place_pop(n: Op) -> Placed:
    """Remove and return the last element."""
    taken = take(n, 1, stacked=False)
    if taken is None:
        return whole(n)
    return taken._replace(outputs=(n.placement(0), *taken.outputs), zero=(n.inputs[0].zero,) * 2)


def place_stack(n: Op) -> Placed:
    """Stack all elements."""
    return take(n, 1, stacked=True) or whole(n)


def place_gather(n: Op) -> Placed:
    """Stack some elements."""
    return take(n, 2, stacked=True) or whole(n)


def _item_shape(n: Op, operand: int) -> Shape | None:
    shape, stated = n.shape(0), stated_shape(n, operand)
    if shape is None or stated is None or len(shape) != len(stated):
        return shape if stated is None or n.placement(0).is_split else stated
    return tuple(mine if mine is not None else other for mine, other in zip(shape, stated, strict=True))


def _stacked_shape(n: Op) -> tuple[Shape | None, ...]:
    count = n.attr("num_elements", -1)
    return (stacked(_item_shape(n, 1), None if count < 0 else count),)


def place_unstack(n: Op) -> Placed:
    """Make a list of the slices along the first dimension."""
    element = without_leading(n.inputs[0])
    if element is None:
        return whole(n)._replace(note=PER_EXAMPLE)
    operand = 1 if n.op == "TensorListFromTensor" else 2
    stated = element_shape(n, operand, element)
    if stated is None or element.is_local:
        return whole(n)
    return Placed((element.placement,), others_whole(n, 0, operand) | stated, zero=(n.inputs[0].zero,))


def place_scatter_into(n: Op) -> Placed:
    """Put the slices of a tensor into an existing list."""
    element = without_leading(n.inputs[1])
    container = n.inputs[0]
    if element is None:
        return _follow(n, container)._replace(note=PER_EXAMPLE)
    if container.placement != ANY and container.placement != element.placement:
        return _follow(n, container)
    return Placed((element.placement,), made_whole(n, 2), zero=(container.zero and element.zero,))


def _follow(n: Op, container: Fact) -> Placed:
    if container.placement.differs:
        return whole(n)
    return Placed((REPLICATED,), others_whole(n, 0))


def place_concat(n: Op) -> Placed:
    """Concatenate the elements along their first dimension, which must not be the split one."""
    if n.placement(0) == split(0):
        return whole(n)
    if n.op == "TensorListConcat":
        return Placed((REPLICATED if n.placement(0) == ANY else n.placement(0), REPLICATED))
    taken = take(n, 1, stacked=False)
    return whole(n) if taken is None else taken._replace(outputs=(*taken.outputs, REPLICATED), zero=())


def place_split(n: Op) -> Placed:
    """Make a list of pieces along the first dimension."""
    tensor = n.inputs[0]
    stated = None if tensor.placement == split(0) or tensor.is_local else element_shape(n, 1, tensor)
    return whole(n) if stated is None else Placed((tensor.placement,), made_whole(n, 2) | stated)


def _piece_shape(n: Op) -> Shape | None:
    return stacked(element_of(n.shape(0)))


def place_join(n: Op) -> Placed:
    """Append one list to another; two lists that disagree cannot be converted in place."""
    placements = {fact.placement for fact in n.inputs} - {ANY}
    if len(placements) > 1:
        return whole(n)
    return Placed((placements.pop() if placements else ANY,))


def place_length(n: Op) -> Placed:
    """Return the length, which is equal on all replicas."""
    return Placed((REPLICATED,))


def place_element_shape(n: Op) -> Placed:
    """Return the elements' shape, which counts a block if the elements are split."""
    return Placed((LOCAL if any_local(n.shape(0)) else REPLICATED,))


def _place_push(n: Op) -> Placed:
    """Append an element, converted to the placement of the other elements."""
    return _put(n, 1)


def _place_set(n: Op) -> Placed:
    """Set an element, converted to the placement of the other elements."""
    return _put(n, 2)


RULES: dict[str, Rule] = {
    **every(Rule(place_make, lambda n: (stated_shape(n, 0),)), "EmptyTensorList TensorListReserve"),
    "TensorListPushBack": Rule(_place_push, lambda n: (_element_or_list(n, n.shape(1)),), _pushed_value),
    "TensorListSetItem": Rule(_place_set, lambda n: (_element_or_list(n, n.shape(2)),)),
    "TensorListResize": Rule(place_keep, like_first),
    "TensorListGetItem": Rule(place_get, lambda n: (_item_shape(n, 2),), first_value),
    "TensorListPopBack": Rule(place_pop, lambda n: (n.shape(0), _item_shape(n, 1)), first_value),
    "TensorListStack": Rule(place_stack, _stacked_shape),
    "TensorListGather": Rule(place_gather, lambda n: (stacked(_item_shape(n, 2), (n.shape(1) or (None,))[0]),)),
    **every(
        Rule(place_unstack, lambda n: (element_of(n.shape(0)),)),
        "TensorListFromTensor TensorListScatter TensorListScatterV2",
    ),
    "TensorListScatterIntoExistingList": Rule(
        place_scatter_into, lambda n: (_element_or_list(n, element_of(n.shape(1))),)
    ),
    **every(Rule(place_concat, lambda n: (_piece_shape(n), (None,))), "TensorListConcat TensorListConcatV2"),
    "TensorListSplit": Rule(place_split, lambda n: (_piece_shape(n),)),
    "TensorListConcatLists": Rule(place_join, lambda n: (join(n.inputs, n.semantics.extent.units).shape,)),
    "TensorListLength": Rule(place_length, scalar),
    "TensorListElementShape": Rule(place_element_shape, shape_of_shape, lambda n: (n.shape(0),)),
    "TensorListPushBackBatch": Rule(whole),
}
