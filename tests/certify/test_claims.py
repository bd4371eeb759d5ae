"""Wrong claims of real programs are refused, and so is what a wrong rule of propagation claims."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from autograph_rewrite.analysis import transfer
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.certify.check_claims import check_claims
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ops.rules.table import TABLE
from tests.certify.wrong_claims import CHANGES, claims_of, spoiled, wrong_claims
from tests.seeded_mistakes.draws import Draw
from tests.support.rewriting import run_pipeline

PROGRAMS = (
    ("mlp", "momentum", "shared3"),
    ("transformer", "adam", "fsdp2"),
    ("language_model", "sgd", "shared2"),
    ("lstm_v1", "sgd", "mirrored2"),
    ("gru_v2", "sgd", "shared2"),
    ("random_and_branch", "own", "shared2"),
)
RULES = (
    # op, how its rule is wrong, program, config
    ("Square", "blocks are whole", "transformer", "shared2"),
    ("Softmax", "blocks of the next dimension", "mlp", "shared2"),
    ("MatMul", "contributions are whole", "mlp", "mirrored3"),
    ("MatMul", "reads blocks as they are", "contrastive", "shared2"),
    ("Conv2DBackpropFilter", "contributions are blocks", "cnn", "mirrored2"),
    ("Sum", "contributions to a maximum", "mlp", "shared2"),
    ("Max", "contributions are whole", "random_and_branch", "shared2"),
    ("Reshape", "blocks of the next dimension", "language_model", "shared2"),
    ("UnsortedSegmentSum", "contributions are whole", "language_model", "mirrored2"),
    ("Tile", "blocks are whole", "mlp", "shared3"),
    ("TensorListGetItem", "blocks are whole", "lstm_v2", "shared2"),
    ("TensorArrayReadV3", "blocks are whole", "lstm_v1", "mirrored2"),
    ("Switch", "blocks are whole", "cond_v1", "shared2"),
)


@pytest.mark.parametrize(("program", "optimizer", "config"), PROGRAMS)
def test_one_wrong_claim_is_refused_wherever_it_is(program: str, optimizer: str, config: str) -> None:
    graph, claims = claims_of(Draw(program, optimizer, config))
    order, kinds = topological_order(graph), Counter[str]()
    check_claims(order, claims)  # the right ones pass
    for wrong in wrong_claims(graph, claims, random.Random(7), each=4):
        with pytest.raises(VerifyError, match=r"the placement of '.*' \(.*\) is wrong"):
            check_claims(order, wrong.claims)
        kinds[wrong.kind] += 1
    assert len(kinds) >= len(CHANGES)


@pytest.mark.parametrize(("op", "how", "program", "config"), RULES)
def test_what_a_wrong_rule_claims_is_refused(
    op: str, how: str, program: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Draw(program, "own" if program in ("contrastive", "random_and_branch") else "momentum", config)
    monkeypatch.setitem(TABLE, op, spoiled(TABLE[op], how))  # type: ignore[arg-type]
    # Propagation runs an op whole whose rule contradicts itself; the certificate must find it without that.
    monkeypatch.setattr(transfer, "_check_blocks", lambda placement, shape: None)
    with pytest.raises(VerifyError, match="is wrong") as caught:
        run_pipeline(draw.flat, draw.plan, certificate=Certificate(strict=True))
    assert "as propagation left it" in str(caught.value) + "".join(caught.value.__notes__)
