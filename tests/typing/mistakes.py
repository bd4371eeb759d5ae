"""What a user mistypes; each line names the kind of error that mypy has to report there."""

from __future__ import annotations

import autograph_rewrite as ar


def step(x: float) -> float:
    return x


item = ar.GraphItem.load("graph.ar", train_opp="train")  # E: call-arg
ar.verify(item, "fsdp", stepz=3)  # E: call-arg
ar.verify(item, "fsdp", steps="3")  # E: arg-type
ar.verify(item, 3)  # E: arg-type
print(ar.verify(item, "fsdp").okay)  # E: attr-defined
ar.bisect(item, "fsdp", sed=1)  # E: call-arg
print(ar.reduce(item, "fsdp").itm)  # E: attr-defined
ar.simulate(item, "fsdp", batchs=8)  # E: call-arg
print(ar.simulate(item, "fsdp").step_second)  # E: attr-defined
ar.report(item, titel="graph")  # E: call-arg
ar.explain(item, batch="8")  # E: arg-type
ar.dump(item, format="txt")  # E: arg-type
ar.rewrite(item, "fsdp", observer=[])  # E: call-arg
ar.build_plan(item, batch=1.5)  # E: arg-type
ar.distribute(step, "fsdp")("x")  # E: arg-type
ar.rewrit(item)  # E: attr-defined
