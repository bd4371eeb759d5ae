"""The certificate: right rewrites pass behind every pass, and seeded mistakes are refused with their place."""

from __future__ import annotations

import pytest

from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.errors import VerifyError
from tests.seeded_mistakes.draws import Draw
from tests.seeded_mistakes.judge import judge
from tests.seeded_mistakes.seed import KINDS, Mistake, spoil
from tests.support.rewriting import run_pipeline

RIGHT = (
    ("mlp", "momentum", "shared3"),
    ("mlp", "adagrad", "mirrored2"),
    ("language_model", "adam", "ps2"),
    ("cond_v1", "sgd", "mirrored3"),
    ("ordered_updates", "own", "fsdp2"),
    ("counted", "own", "parallax3"),
    ("contrastive", "own", "micro_interleaved"),
    ("staged/tied", "adam", "pipeline"),
)
WRONG = (
    ("ordered_updates", "shared2", "updates_swapped"),
    ("ordered_updates", "fsdp2", "read_before_update"),
    ("ordered_updates", "fsdp2", "stale_alias"),
    ("counted", "mirrored3", "size_of_one_replica"),
    ("counted", "shared2", "effect_repeated"),
    ("contrastive", "mirrored2", "gather_reversed"),
    ("contrastive", "shared3", "block_of_another_replica"),
    ("random_and_branch", "shared2", "mask_of_its_own"),
    ("random_and_branch", "mirrored2", "contribution_lost"),
    ("counted", "micro_shared", "contribution_doubled"),
)


@pytest.mark.parametrize(("program", "optimizer", "config"), RIGHT)
def test_a_right_rewrite_is_certified_whole(program: str, optimizer: str, config: str) -> None:
    draw, certificate = Draw(program, optimizer, config), Certificate(strict=True)
    run_pipeline(draw.flat, draw.plan, certificate=certificate)
    assert not certificate.not_covered
    assert not certificate.inexact


@pytest.mark.parametrize(("program", "config", "kind"), WRONG)
def test_a_seeded_mistake_is_refused(program: str, config: str, kind: str) -> None:
    mistake = Mistake(Draw(program, "own", config), next(one for one in KINDS if one.__name__ == kind))
    with pytest.raises(VerifyError):
        spoil(mistake, Certificate(strict=True), let_through=True)


def test_a_refusal_names_the_node_its_op_and_the_pass() -> None:
    kind = next(one for one in KINDS if one.__name__ == "update_dropped")
    row = judge(Mistake(Draw("mlp", "sgd", "shared2"), kind), run_refused=False)
    assert row["verdict"] == "not run"
    assert "behind order-accesses" in row["refused"]


@pytest.mark.parametrize("kind", ["update_dropped", "target_waits_for_less"])
def test_what_is_no_longer_brought_about_with_a_loop_is_refused(kind: str) -> None:
    chosen = next(one for one in KINDS if one.__name__ == kind)
    row = judge(Mistake(Draw("mlp", "sgd", "loop_shared"), chosen, "roll-loop"), run_refused=False)
    assert "no longer runs" in row["refused"], row
