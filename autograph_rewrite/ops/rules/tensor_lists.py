"""Tensor lists: the fact of a handle is the fact of its elements (their placement and shape).

Every replica has a list of the same length; where elements are split, each list holds its replica's
blocks. So the dimension that a list adds or removes (stacking) must not be the split one. A list that
nothing was put into is `ANY`.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import ANY, LOCAL, REPLICATED, Fact, Placement, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import any_local, is_local, is_settled
from autograph_rewrite.ops.rules.base import LocalEntry, Op, Placed, Reshard, Rule, Values, others_whole, scalar, whole
from autograph_rewrite.ops.rules.join import MISFIT, conform, join, join_shapes
from autograph_rewrite.ops.rules.signature import every


def with_leading(placement: Placement) -> Placement:
    """Return the placement of stacked elements."""
    return split(placement.dim + 1) if placement.is_split else placement


PER_EXAMPLE = "one element for each example: a list or array is not cut into blocks, so it holds whole values"


def without_leading(fact: Fact) -> Fact | None:
    """Return the fact of the elements of an unstacked tensor; None where its first dimension is split."""
    if fact.placement == split(0):
        return None
    placement = split(fact.placement.dim - 1) if fact.placement.is_split else fact.placement
    shape = None if not fact.shape else fact.shape[1:]
    return fact._replace(placement=placement, shape=shape, value=None)


def element_shape(n: Op, index: int, element: Fact) -> Reshard | bool:
    """Return whether the operand that states the elements' shape fits as it is, or what it has to become.

    Args:
        element: fact of the list's elements.
    """
    operand = n.inputs[index]
    if not element.placement.is_split:
        return REPLICATED if operand.placement.differs else True
    dim, size = element.placement.dim, element.split_size
    if operand.is_local:
        value = operand.value or ()
        fits = dim < len(value) and is_local(value[dim]) and not any_local(value[:dim] + value[dim + 1 :])
        return fits
    if operand.placement.differs:
        return False
    if operand.shape == () or (operand.value is not None and operand.value[dim : dim + 1] == (-1,)):
        return True  # unknown rank, or unknown size
    return False if size is None or operand.shape is None else LocalEntry(dim, size)


def stated_shape(n: Op, index: int) -> Shape | None:
    """Return the contents of a shape operand; None where the rank is unknown."""
    value, shape = n.value(index), n.shape(index)
    if value is None or shape == ():
        return None
    return tuple(None if dim == -1 else dim for dim in value)


def place_make(n: Op) -> Placed:
    """An empty list takes what is put in; if its element shape counts a block it is split from the start.

    Reserved elements are zeros. A list without elements is not zero, so that one can tell the two apart.
    """
    zero = (n.op == "TensorListReserve",)
    operand_reshards: dict[int, Reshard] = {1: REPLICATED} if n.placement(1).differs else {}
    local = [i for i, dim in enumerate(n.value(0) or ()) if is_local(dim)]
    if n.inputs[0].is_local and len(local) == 1:
        return Placed((split(local[0]),), operand_reshards, zero=zero)
    if n.placement(0).differs:
        operand_reshards[0] = REPLICATED
    return Placed((ANY,), operand_reshards, zero=zero)


def put(n: Op, handle: int, item: int) -> Placed:
    """Put one element into a list: it is converted to the placement of those that are there already.

    Args:
        handle: operand that is the list.
        item: operand that is the element.
    """
    container, element = n.inputs[handle], n.inputs[item]
    return _put(n, handle, container, {item: element})


def _put(n: Op, handle: int, container: Fact, elements: dict[int, Fact]) -> Placed:
    """A list cannot be converted, so what is put in must follow it, unless it is empty."""
    operand_reshards = others_whole(n, handle, *elements)
    batch = n.semantics.extent.units
    follows = [fact for fact in elements.values() if fact.placement == container.placement]
    target = join(elements.values(), batch) if container.placement == ANY else join([container, *follows], batch)
    if container.is_local or target.is_local:
        return _put_sizes(n, handle, container, operand_reshards)
    for i, element in elements.items():
        reshard = conform(element, target, batch)
        if reshard == MISFIT:
            return whole(n)
        if reshard is not None:
            operand_reshards[i] = reshard
    zero = container.zero and all(element.zero for element in elements.values())
    return Placed((target.placement,), operand_reshards, zero=(zero,))


def _put_sizes(n: Op, handle: int, container: Fact, operand_reshards: dict[int, Reshard]) -> Placed:
    """Sizes of blocks stay what they are in a list of equal ones; else they have to be whole."""
    if n.op == "TensorListPushBack" and _pushed_value(n) is not None:
        return Placed((LOCAL,), operand_reshards)
    if container.is_local:
        return whole(n)
    sizes = {i: REPLICATED for i, fact in enumerate(n.inputs) if i != handle and fact.is_local}
    return Placed((REPLICATED,), operand_reshards | sizes)


def _element_or_list(n: Op, handle: int, element: Shape | None) -> Shape | None:
    container = n.inputs[handle]
    known = container.placement != ANY and container.shape is not None
    if not known or element is None:
        return element if element is not None else container.shape
    rows = container.split_size
    if container.placement.is_split and not is_settled(rows) and container.placement.dim < len(element):
        rows = element[container.placement.dim]
    return join_shapes([container.shape, element], container.placement, rows)


def _pushed_value(n: Op) -> Values | None:
    """The contents of every element, as long as all that were pushed are equal: the sizes of a loop's values."""
    container, element = n.inputs
    unset = container.placement == ANY and not container.zero
    return (element.value,) if element.value is not None and (unset or container.value == element.value) else None


def place_keep(n: Op) -> Placed:
    """Change the length only; new elements are zeros, so no longer equal sizes."""
    if n.inputs[0].is_local:
        return whole(n)
    return Placed((n.placement(0),), others_whole(n, 0), zero=(n.inputs[0].zero,))


def _kept_shape(n: Op) -> tuple[Shape | None, ...]:
    return (n.shape(0),)


def take(n: Op, operand: int, *, stacked: bool) -> Placed | None:
    """Read elements (zeros, of an empty list); None where the element shape cannot be made to fit.

    Args:
        n: the op; operand 0 is the list.
        operand: which states the elements' shape.
        stacked: all elements along a new dimension 0, instead of one of them.
    """
    element = n.inputs[0]
    if element.is_local and (stacked or element.value is None):
        return None
    placement = REPLICATED if element.placement == ANY else element.placement
    operand_reshards = others_whole(n, 0, operand)
    reshard = element_shape(n, operand, element._replace(placement=placement))
    if reshard is False:
        return None
    if not isinstance(reshard, bool):
        operand_reshards[operand] = reshard
    return Placed((with_leading(placement) if stacked else placement,), operand_reshards, zero=(element.zero,))


def place_get(n: Op) -> Placed:
    """Read one element."""
    return take(n, 2, stacked=False) or whole(n)


def place_pop(n: Op) -> Placed:
    """Take the last element off."""
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


def _got_value(n: Op) -> Values | None:
    return None if n.value(0) is None else (n.value(0),)


def _popped_value(n: Op) -> Values | None:
    return None if n.value(0) is None else (n.value(0), n.value(0))


def _popped_shape(n: Op) -> tuple[Shape | None, ...]:
    return (n.shape(0), _item_shape(n, 1))


def _stacked_shape(n: Op) -> tuple[Shape | None, ...]:
    shape, count = _item_shape(n, 1), n.attr("num_elements", -1)
    return (None if shape is None else (None if count < 0 else count, *shape),)


def _gathered_shape(n: Op) -> tuple[Shape | None, ...]:
    shape, indices = _item_shape(n, 2), n.shape(1)
    return (None if shape is None else (indices[0] if indices else None, *shape),)


def place_unstack(n: Op) -> Placed:
    """Make a list of the slices along the first dimension."""
    element = without_leading(n.inputs[0])
    operand = 1 if n.op == "TensorListFromTensor" else 2
    reshard = False if element is None else element_shape(n, operand, element)
    if element is None:
        return whole(n)._replace(note=PER_EXAMPLE)
    if reshard is False or element.is_local:
        return whole(n)
    operand_reshards = others_whole(n, 0, operand)
    if not isinstance(reshard, bool):
        operand_reshards[operand] = reshard
    return Placed((element.placement,), operand_reshards, zero=(n.inputs[0].zero,))


def _unstacked_shape(n: Op) -> tuple[Shape | None, ...]:
    shape = n.shape(0)
    return (None if not shape else shape[1:],)


def place_scatter_into(n: Op) -> Placed:
    """Put the slices of a tensor into an existing list."""
    element = without_leading(n.inputs[1])
    container = n.inputs[0]
    if element is None:
        return _follow(n, container)._replace(note=PER_EXAMPLE)
    if container.placement != ANY and container.placement != element.placement:
        return _follow(n, container)
    indices: dict[int, Reshard] = {2: REPLICATED} if n.placement(2).differs else {}
    return Placed((element.placement,), indices, zero=(container.zero and element.zero,))


def _follow(n: Op, container: Fact) -> Placed:
    if container.placement.differs:
        return whole(n)
    return Placed((REPLICATED,), others_whole(n, 0))


def _scattered_shape(n: Op) -> tuple[Shape | None, ...]:
    shape = n.shape(1)
    return (_element_or_list(n, 0, shape[1:] if shape else None),)


def place_concat(n: Op) -> Placed:
    """Concatenate the elements along their first dimension, which must not be the split one."""
    if n.placement(0) == split(0):
        return whole(n)
    if n.op == "TensorListConcat":
        return Placed((REPLICATED if n.placement(0) == ANY else n.placement(0), REPLICATED))
    taken = take(n, 1, stacked=False)
    return whole(n) if taken is None else taken._replace(outputs=(*taken.outputs, REPLICATED), zero=())


def _concatenated_shape(n: Op) -> tuple[Shape | None, ...]:
    shape = n.shape(0)
    return (None if not shape else (None, *shape[1:]), (None,))


def place_split(n: Op) -> Placed:
    """Make a list of pieces along the first dimension."""
    tensor = n.inputs[0]
    reshard = False if tensor.placement == split(0) or tensor.is_local else element_shape(n, 1, tensor)
    if reshard is False:
        return whole(n)
    operand_reshards: dict[int, Reshard] = {2: REPLICATED} if n.placement(2).differs else {}
    if not isinstance(reshard, bool):
        operand_reshards[1] = reshard
    return Placed((tensor.placement,), operand_reshards)


def _piece_shape(n: Op) -> tuple[Shape | None, ...]:
    shape = n.shape(0)
    return (None if not shape else (None, *shape[1:]),)


def place_join(n: Op) -> Placed:
    """Append one list to another; two lists that disagree cannot be converted in place."""
    placements = {fact.placement for fact in n.inputs} - {ANY}
    if len(placements) > 1:
        return whole(n)
    return Placed((placements.pop() if placements else ANY,))


def place_length(n: Op) -> Placed:
    """All replicas' lists are equally long."""
    return Placed((REPLICATED,))


def place_element_shape(n: Op) -> Placed:
    """The elements' shape counts a block where they are split."""
    return Placed((LOCAL if any_local(n.shape(0)) else REPLICATED,))


def _vector(n: Op) -> tuple[Shape | None, ...]:
    return (None if n.shape(0) is None else (n.rank(0),),)


def _place_push(n: Op) -> Placed:
    """Append an element, converted to the placement of those that are there."""
    return put(n, 0, 1)


def _place_set(n: Op) -> Placed:
    """Set an element, converted to the placement of those that are there."""
    return put(n, 0, 2)


RULES: dict[str, Rule] = {
    **every(Rule(place_make, lambda n: (stated_shape(n, 0),)), "EmptyTensorList TensorListReserve"),
    "TensorListPushBack": Rule(_place_push, lambda n: (_element_or_list(n, 0, n.shape(1)),), _pushed_value),
    "TensorListSetItem": Rule(_place_set, lambda n: (_element_or_list(n, 0, n.shape(2)),)),
    "TensorListResize": Rule(place_keep, _kept_shape),
    "TensorListGetItem": Rule(place_get, lambda n: (_item_shape(n, 2),), _got_value),
    "TensorListPopBack": Rule(place_pop, _popped_shape, _popped_value),
    "TensorListStack": Rule(place_stack, _stacked_shape),
    "TensorListGather": Rule(place_gather, _gathered_shape),
    **every(
        Rule(place_unstack, _unstacked_shape),
        "TensorListFromTensor TensorListScatter TensorListScatterV2",
    ),
    "TensorListScatterIntoExistingList": Rule(place_scatter_into, _scattered_shape),
    **every(Rule(place_concat, _concatenated_shape), "TensorListConcat TensorListConcatV2"),
    "TensorListSplit": Rule(place_split, _piece_shape),
    "TensorListConcatLists": Rule(place_join, lambda n: (join(n.inputs, n.semantics.extent.units).shape,)),
    "TensorListLength": Rule(place_length, scalar),
    "TensorListElementShape": Rule(place_element_shape, _vector, lambda n: (n.shape(0),)),
    "TensorListPushBackBatch": Rule(whole),
}
