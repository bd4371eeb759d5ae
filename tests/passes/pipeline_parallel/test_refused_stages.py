"""What a user gets wrong about the stages of a configuration is named."""

from __future__ import annotations

from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, PlanError, RewriteError
from autograph_rewrite.load.files import from_printed

LAYERS = 4


def chain() -> ar.GraphItem:
    """Return layers p0, h0, p1, h1, and so on, and gradient descent."""
    lines = [
        "# input %x, batch axis 0",
        "# output loss = %loss",
        "# target %train",
        "%x: float32[8,3] = Placeholder()",
        "%axes: int32[2] = Const() {value=[0, 1]}",
        "%rate: float32 = Const() {value=0.1}",
    ]
    for i in range(LAYERS):
        lines += [
            f'%w{i}: resource = VarHandleOp() {{dtype=float32, shape=[3,3], shared_name="w{i}"}}',
            f"%w{i}/read: float32[3,3] = ReadVariableOp(%w{i})",
            f"%p{i} = MatMul(%{f'h{i - 1}' if i else 'x'}, %w{i}/read)",
            f"%h{i} = Tanh(%p{i})",
        ]
    last, slope = LAYERS - 1, f"%gradients/h{LAYERS - 1}_grad/TanhGrad"
    lines += [
        f"%loss = Sum(%h{last}, %axes)",
        f"%gradients/loss_grad/ones = OnesLike(%h{last})",
        f"{slope} = TanhGrad(%h{last}, %gradients/loss_grad/ones)",
        f"%gradients/p{last}_grad/MatMul_1 = MatMul(%h{last - 1}, {slope}) {{transpose_a=true}}",
        f"%train = ResourceApplyGradientDescent(%w{last}, %rate, %gradients/p{last}_grad/MatMul_1)",
    ]
    return from_printed("\n".join(lines), {})


CASES: list[tuple[dict[str, Any], type[RewriteError], str]] = [
    ({"stages": 3, "boundaries": ["h1", "h0"]}, PlanError, r"the boundary 'h0' .* lies before 'h1'"),
    ({"stages": 2, "names": ["[ph][123]", "[ph]0"]}, PlanError, r"an edge leads back: .* is in stage 0"),
    ({"stages": 2, "names": [".*", "nothing"]}, PlanError, "no node of the model is in stage 1"),
    ({"stages": 2, "boundaries": ["h7"]}, PlanError, "the graph has no tensor 'h7'"),
    ({"stages": 400}, PlanError, "fewer than 400 stages"),
    ({"stages": 4, "boundaries": ["h0"]}, ConfigError, "boundaries has 1 entries; 4 stages need 3"),
    (
        {"stages": 4, "form": "loop", "schedule": "1f1b"},
        ConfigError,
        r"form is loop, which runs all forwards before all backwards, not as 1f1b",
    ),
    (
        {"stages": 2, "form": "loop", "circular_repeat": 2, "schedule": "gpipe"},
        ConfigError,
        "gpipe has one stage per device",
    ),
    ({"stages": 2, "microbatch_size": 3}, ConfigError, "microbatch_size is 3, but the size of the batch is 8"),
]


@pytest.mark.parametrize(("pipeline", "error", "problem"), CASES)
def test_stages_that_cannot_be_are_refused(pipeline: dict[str, Any], error: type[RewriteError], problem: str) -> None:
    micro = {} if "microbatch_size" in pipeline else {"microbatches": 2}
    with pytest.raises(error, match=problem):
        ar.rewrite(chain(), {"devices": ["CPU:0"], "pipeline": {**micro, **pipeline}})


def test_micro_batches_can_be_counted_by_their_size() -> None:
    pipeline = {"stages": 2, "microbatch_size": 2, "boundaries": ["h0"]}
    assert ar.build_plan(chain(), {"devices": ["CPU:0"], "pipeline": pipeline}).microbatches == 4
