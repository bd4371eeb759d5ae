"""Validate the batch sizes that are fed to one step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autograph_rewrite.errors import GraphError
from autograph_rewrite.plan.plan import Plan


def check_batch_sizes(
    sizes: Mapping[str, int], plan: Plan | None = None, groups: Sequence[Collection[str]] = ()
) -> None:
    """Refuse inputs whose sizes meet and differ, or one that cannot be divided as asked.

    Args:
        sizes: by input name.
        plan: under which they were distributed.
        groups: the names of those that must be of one size; none: all must.

    Raises:
        GraphError: the sizes differ, or micro-batches would.
    """
    for group in groups or [sizes]:
        own = {name: size for name, size in sizes.items() if name in group}
        if len(set(own.values())) < 2:
            continue
        listed = ", ".join(f"{name}: {size}" for name, size in own.items())
        raise GraphError(
            f"the batch inputs of one step have different sizes ({listed})",
            hint="give None as the axis of the inputs that all replicas share: batch_inputs={'name': None}",
        )
    if plan is None or plan.micro is None or plan.micro.uneven:
        return
    for name, size in sizes.items():
        if size % plan.instances_each:
            raise GraphError(
                f"the batch of {size} examples in '{name}' cannot be divided among "
                f"{plan.replicas_each} x {plan.microbatches} micro-batches",
                hint="feed another number of them, or set accumulation.uneven to allow",
            )
