"""Tensor arrays and stacks are resources: propagation keeps a fact of their contents (`Op.cells`) for readers.

Propagation joins the `element`s of all writes of a container with `join.join`; each write then converts its element to
the joined fact. The flow, a number that only orders operations, is partial if each replica has a separate array: no
reader uses its value, and sums of flows (in gradients) keep that placement.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import ANY, PARTIAL, REPLICATED, UNKNOWN, Fact, Placement, Shape, split
from autograph_rewrite.ops.rules.base import Op, Placed, Reshard, Rule, others_whole, scalar
from autograph_rewrite.ops.rules.join import MISFIT, conform
from autograph_rewrite.ops.rules.signature import every
from autograph_rewrite.ops.rules.tensor_lists import PER_EXAMPLE, element_of, stacked, with_leading, without_leading

EMPTY = Fact(ANY, 0)


def element(op: str, value: Fact) -> Fact:
    """Return the fact of an element that a write of `op` puts in, from the value before conversion."""
    if op == "TensorArrayScatterV3":
        return without_leading(value) or Fact(REPLICATED, value.dtype, (value.shape or (None,))[1:] or None)
    if op == "TensorArrayConcatV3":
        return Fact(PARTIAL, value.dtype)  # it joins with no blocks, so the array becomes whole
    if op == "TensorArraySplitV3":
        whole_rows = value.placement == split(0)
        shape = None if value.shape is None else (None, *value.shape[1:])
        return Fact(REPLICATED if whole_rows else value.placement, value.dtype, shape, zero=value.zero)
    if value.is_local and (value.value is None or None in value.value):
        return value._replace(placement=REPLICATED, value=None)
    return value  # local sizes stay if all writes agree on them: a shape kept for the gradient of a loop


def _content(n: Op) -> Fact:
    """Return the fact of the container's elements; zeros if it has none."""
    fact = n.cells.get(0, EMPTY)
    if fact.placement in (ANY, UNKNOWN):
        return fact._replace(placement=REPLICATED, zero=True)
    return fact


def _token(fact: Fact) -> Placement:
    """Return the placement of a flow: partial if each replica has a separate container."""
    return PARTIAL if fact.placement.differs else REPLICATED


def _flow_input(n: Op) -> int:
    return len(n.inputs) - 1


def _parameters(n: Op, *taken: int) -> dict[int, Reshard]:
    """Return the conversions of sizes and indices: inputs other than the handle, the flow and those in `taken`."""
    return others_whole(n, 0, _flow_input(n), *taken)


def _lift(op: str, content: Fact) -> Fact:
    """Return the fact of a written value whose elements match those of the container."""
    if op != "TensorArrayScatterV3":
        return content
    return content._replace(placement=with_leading(content.placement), shape=stacked(content.shape))


def place_make(n: Op) -> Placed:
    """Make an array, whose placement is that of the elements put in later."""
    return Placed((ANY,) * len(n.output_dtypes), others_whole(n))


def place_gradient(n: Op) -> Placed:
    """Make the array of gradients of another array, which starts empty, with zeros."""
    return Placed((ANY, ANY), others_whole(n, 0, 1), zero=(True, True))


def place_write(n: Op) -> Placed:
    """Write, scatter or split a value into an array."""
    index = 1 if n.op == "TensorArraySplitV3" else 2
    content, operand_reshards = _put(n, index)
    note = PER_EXAMPLE if n.op == "TensorArrayScatterV3" and n.placement(index) == split(0) else ""
    return Placed((_token(content),), operand_reshards, zero=(content.zero,), holds=(0, index), note=note)


def _put(n: Op, index: int) -> tuple[Fact, dict[int, Reshard]]:
    """Return the fact of a container's elements with the value that is put in, and the conversions."""
    value, content = n.inputs[index], n.cells.get(0, EMPTY)
    if content.placement in (ANY, UNKNOWN):
        content = element(n.op, value)  # the first write decides
    if n.op == "TensorArraySplitV3" and content.placement == split(0):
        content = content._replace(placement=REPLICATED)
    reshard = conform(value, _lift(n.op, content), n.semantics.extent.units)
    if reshard == MISFIT:  # the elements will be whole once propagation has joined all writes
        content, reshard = content._replace(placement=REPLICATED), REPLICATED
    return content, _parameters(n, index) | ({} if reshard is None else {index: reshard})


def place_read(n: Op) -> Placed:
    """Read one element, or stack some or all."""
    content = _content(n)
    placement = with_leading(content.placement) if n.op == "TensorArrayGatherV3" else content.placement
    outputs = (placement, REPLICATED)[: len(n.output_dtypes)]
    return Placed(outputs, _parameters(n), zero=(content.zero, False)[: len(outputs)])


def place_concat(n: Op) -> Placed:
    """Concatenate the elements; if they are blocks of rows, make the array whole, as rows would be in another order."""
    placed = place_read(n)
    return placed._replace(holds=(0, _flow_input(n))) if placed.outputs[0] == split(0) else placed


def place_size(n: Op) -> Placed:
    """Return the length, which is equal on all replicas."""
    return Placed((REPLICATED,))


def place_close(n: Op) -> Placed:
    """Close each replica's array."""
    return Placed(())


def _element_shape(n: Op) -> tuple[Shape | None, ...]:
    return (_content(n).shape,)


def _handle_and_flow(n: Op) -> tuple[Shape | None, ...]:
    return (None, ())[: len(n.output_dtypes)]


def place_push(n: Op) -> Placed:
    """Push a value on a stack and pass it on."""
    content, operand_reshards = _put(n, 1)
    return Placed((content.placement,), operand_reshards, zero=(n.inputs[1].zero,), holds=(0, 1))


def place_pop(n: Op) -> Placed:
    """Remove and return the last value of a stack."""
    content = _content(n)
    return Placed((content.placement,), zero=(content.zero,))


RULES: dict[str, Rule] = {
    "TensorArrayV3": Rule(place_make, _handle_and_flow),
    **every(Rule(place_gradient, _handle_and_flow), "TensorArrayGradV3 TensorArrayGradWithShape"),
    **every(Rule(place_write, scalar), "TensorArrayWriteV3 TensorArrayScatterV3 TensorArraySplitV3"),
    "TensorArrayReadV3": Rule(place_read, _element_shape),
    "TensorArrayGatherV3": Rule(place_read, lambda n: (stacked(_content(n).shape, (n.shape(1) or (None,))[0]),)),
    "TensorArrayConcatV3": Rule(place_concat, lambda n: (stacked(element_of(_content(n).shape)), (None,))),
    "TensorArraySizeV3": Rule(place_size, scalar),
    "TensorArrayCloseV3": Rule(place_close),
    "StackV2": Rule(place_make, _handle_and_flow),
    "StackPushV2": Rule(place_push, lambda n: (n.shape(1),), lambda n: (n.value(1),)),
    "StackPopV2": Rule(place_pop, _element_shape, lambda n: (_content(n).value,)),
    "StackCloseV2": Rule(place_close),
}
