"""What a user writes, and a type checker accepts."""

from __future__ import annotations

from pathlib import Path

import autograph_rewrite as ar


def step(x: float) -> float:
    return x


item = ar.GraphItem.load("graph.ar", train_op=["train"])
plan: ar.Plan = ar.build_plan(item, "fsdp", batch=8)
new: ar.GraphItem = ar.rewrite(item, {"devices": ["CPU:0", "CPU:1"]})
result: float = ar.distribute(step, ar.Config.load("auto"))(1.0)
worst: float = ar.verify(item, plan, steps=3, feeds=[{"x": 1}]).max_error
first: str = ar.bisect(item, "fsdp").made_by
small: ar.GraphItem = ar.reduce(item, "fsdp", seed=1).item
seconds: float = ar.simulate(item, plan).step_seconds
page: Path = ar.report(item, "report.html", "fsdp")
text: str = ar.explain(new) + ar.dump(item, format="table") + str(ar.diff(item, new))
