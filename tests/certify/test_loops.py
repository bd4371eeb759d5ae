"""The certificate behind the pass that makes loops: right ones pass whole, and mistakes in them are refused."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.certify.simulate import LISTS
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.types import dtypes
from tests.seeded_mistakes import iterations
from tests.seeded_mistakes.bench import Bench
from tests.seeded_mistakes.draws import Draw
from tests.seeded_mistakes.seed import KINDS, Mistake, spoil
from tests.support.rewriting import run_pipeline

RIGHT = (
    ("mlp", "sgd", "loop_shared"),
    ("language_model", "adam", "loop_one"),
    ("ordered_updates", "own", "loop_shared"),
    ("staged/tied", "adam", "pipeline_loop"),
    ("staged/masked", "adam", "pipeline_loop"),
    ("staged/dropout", "adam", "pipeline_loop"),
)
ELSEWHERE = {
    "table_shuffled": "staged/mlp",
    "item_of_another_micro_batch": "staged/mlp",
    "slot_skipped": "staged/mlp",
    "other_list": "staged/mlp",
}
"""Where to make mistakes for which a loop of micro-batches has no place."""
OF_OTHERS = (
    "update_dropped",
    "target_waits_for_less",
    "consumer_rewired",
    "operands_swapped",
    "sum_for_average",
)


@lru_cache
def _draw(program: str, optimizer: str, config: str) -> Draw:
    return Draw(program, optimizer, config)


def never_ends(bench: Bench) -> str:
    """The condition of a loop always holds."""
    cond = bench.pick(bench.where(lambda n: n.op == "LoopCond"))
    less = cond.inputs[0].node
    same = bench.add("Equal", [less.inputs[0], less.inputs[0]], less)
    cond.set_input(0, same.output())
    return f"'{cond.name}' always holds"


@pytest.mark.parametrize(("program", "optimizer", "config"), RIGHT)
def test_a_right_loop_is_certified_whole(program: str, optimizer: str, config: str) -> None:
    draw, certificate = _draw(program, optimizer, config), Certificate(strict=True)
    run_pipeline(draw.flat, draw.plan, certificate=certificate)
    assert not certificate.not_covered


@pytest.mark.parametrize("kind", [*iterations.KINDS, never_ends], ids=lambda kind: str(kind.__name__))
def test_a_mistake_in_a_loop_is_refused(kind: iterations.Kind) -> None:
    program = ELSEWHERE.get(kind.__name__, "mlp")
    draw = _draw(program, "adam", "pipeline_loop") if "/" in program else _draw(program, "sgd", "loop_shared")
    with pytest.raises(VerifyError, match="after pass 'roll-loop'"):
        spoil(Mistake(draw, kind, "roll-loop"), Certificate(strict=True), let_through=True)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_other_mistakes_are_refused_behind_the_loop_too(name: str) -> None:
    kind = next(one for one in KINDS if one.__name__ == name)
    with pytest.raises(VerifyError, match="after pass 'roll-loop'"):
        spoil(
            Mistake(_draw("mlp", "sgd", "loop_shared"), kind, "roll-loop"), Certificate(strict=True), let_through=True
        )


def test_a_loop_that_is_not_understood_is_said_and_not_refused() -> None:
    draw, certificate = _draw("mlp", "sgd", "loop_shared"), Certificate(strict=True)

    def hide(name: str, graph: Graph) -> None:
        if name == "roll-loop":  # nobody can tell what this gives
            limit = next(node for node in graph if node.op == "Less" and node.span == EACH).inputs[1]
            enter = limit.node
            attrs = {"dtype": dtypes.INT32, "shape": ()}
            enter.set_input(0, graph.add("Placeholder", name="limit_of_a_user", attrs=attrs).output())

    run_pipeline(draw.flat, draw.plan, observers=[hide], certificate=certificate)
    assert any("a loop of the rewrite" in one for one in certificate.not_covered)


def test_what_lists_hold_is_what_tensorflow_gives() -> None:
    import tensorflow as tf

    rows = [np.float32([[1, 2]]), np.float32([[3, 4]])]
    real, kept = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.float32), None
    kept = LISTS["EmptyTensorList"](-1, -1, data=np.asarray)
    for row in rows:
        real = tf.raw_ops.TensorListPushBack(input_handle=real, tensor=row)
        kept = LISTS["TensorListPushBack"](kept, row, data=np.asarray)
    item = tf.raw_ops.TensorListGetItem(input_handle=real, index=1, element_shape=-1, element_dtype=tf.float32)
    stack = tf.raw_ops.TensorListStack(input_handle=real, element_shape=-1, element_dtype=tf.float32)
    joined, _ = tf.raw_ops.TensorListConcatV2(
        input_handle=real, element_shape=-1, leading_dims=np.zeros(0, np.int64), element_dtype=tf.float32
    )
    np.testing.assert_array_equal(LISTS["TensorListGetItem"](kept, 1, -1, data=np.asarray), item)
    np.testing.assert_array_equal(LISTS["TensorListStack"](kept, -1, data=np.asarray), stack)
    np.testing.assert_array_equal(LISTS["TensorListConcatV2"](kept, -1, (), data=np.asarray), joined)
