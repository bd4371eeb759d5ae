"""Check compressed gradients for `ar.verify`: sum plus new residuals must equal gradients plus old residuals.

    w/o error feedback    sum that the update gets  ==  sum of the 16-bit numbers that were sent
    with error feedback   sum that the update gets + residuals after the step  ==  gradients + residuals before it

A compressor is lossy because the user asked for it, so a graph with one cannot be compared with the original. But these
equations hold in every step, and a residual may not exceed the bound of its compressor. The rest of the graph is
compared with the original, without the compressors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autograph_rewrite.check.report import FAILED_STEP, Array, ComparedTensor, Deviation, VerifyReport, epsilon
from autograph_rewrite.check.side_by_side import Tolerance, TrainedGraph, Training, first_line
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.passes.base.report import Compressed
from autograph_rewrite.plan.codecs import codec_of, shown
from autograph_rewrite.plan.parts.lowerings import Operation, lowering
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph

KIND = "compressed"
_SLACK = 1 + 1e-3
_TINY = 2.0**-24  # the least fp16 above zero; negligible in bf16


def without(plan: Plan) -> Plan:
    """Return the plan without compressors; return a plan without any unchanged."""
    if not plan.compresses and all(edge.compressor == NONE for edge in plan.edges):
        return plan
    requests = (replace(one, options=replace(one.options, compressor=NONE)) for one in plan.variables)
    default = replace(plan.default, compressor=NONE)
    return replace(plan, default=default, variables=tuple(requests), edges=())


def with_compressed(report: VerifyReport, rows: Sequence[ComparedTensor], plan: Plan) -> VerifyReport:
    """Return the report of the graph without compressors, with the rows of the compressed sums.

    Args:
        rows: one for each compressed gradient.
    """
    names = list(dict.fromkeys(o.compressor for o in (plan.default, *(r.options for r in plan.variables))))
    asked = ", ".join(shown(name) for name in names if name != NONE)
    if plan.looped:
        said = "so the graph was compared without it; what is in a loop of micro-batches cannot be looked at"
    elif rows:
        said = "so the graph was compared without it, and every compressed sum was checked against what it is made of"
    else:
        said = "but no gradient is compressed"
    every = tuple(sorted((*report.rows, *rows), key=lambda row: (row.ok, -row.error)))
    return replace(
        report,
        ok=report.ok and all(row.ok for row in rows),
        max_error=max((row.error for row in every), default=0.0),
        rows=every,
        notes=(f"{asked} is lossy by choice, {said}", *report.notes),
    )


def compressed_rows(item: TrainingGraph, training: Training, allowed: Tolerance) -> list[ComparedTensor]:
    """Train a rewritten item whose gradients are compressed; return a row for each sum and each copy that differs."""
    sums: tuple[Compressed, ...] = item.report.compressed
    plan: Plan = item.report.plan
    if not sums or plan.looped:
        return []
    devices = range(item.layout.mesh.count(item.layout.mesh.along))
    checks = [_Sum(item, one, allowed, device) for one in sums for device in devices]
    checks = [one for one in checks if one.is_known]
    with TrainedGraph(item, plan.timeout_seconds) as trainee:
        try:
            trainee.start(training)
            for step in range(training.steps):
                tensors = [tensor for check in checks for tensor in check.tensors]
                seen = iter(trainee.observe(training.feeds_of(step), tensors))
                for check in checks:
                    check.see(f"step {step + 1}", [next(seen) for _ in check.tensors])
            copies = _copies(trainee, allowed)
        except trainee.failures as error:
            return [ComparedTensor(FAILED_STEP, KIND, float("inf"), 0.0, first_line(error), ok=False)]
    rows = [check.row() for check in checks]
    return rows + [
        ComparedTensor(name, KIND, one.error, one.max_abs, one.where, ok=False) for name, one in copies.items()
    ]


def _copies(trainee: TrainedGraph, allowed: Tolerance) -> dict[str, Deviation]:
    """Return the variables whose copies differ although all replicas must have applied the same sum."""
    found = {}
    for name, (first, *others) in trainee.read():
        for replica, other in enumerate(others, 1):
            each = allowed.deviation(other, first)
            if each.error > allowed.rtol:
                found[name] = each._replace(where=f"the copies of replicas 0 and {replica}, {each.where}")
    return found


class _Sum:
    """One compressed sum on one device of each replica, and its largest error."""

    def __init__(self, item: TrainingGraph, one: Compressed, allowed: Tolerance, device: int) -> None:
        self._one, self._allowed = one, allowed
        self._codec, self._lowering = codec_of(one.compressor), lowering(one.lowering)
        names = (one.gradient, one.before, one.after, one.result)
        self._groups = [item.layout.on_device(name, device) if name else () for name in names]
        self._device = f" on device {device} of each replica" if item.layout.mesh.along else ""
        self._last: Sequence[Array] = ()
        self._worst = Deviation(0.0, 0.0, "")

    @property
    def is_known(self) -> bool:
        """Whether its codec gives a value that the sum can be compared with."""
        return self._codec.error_feedback or self._codec.sent(np.zeros(1), 1) is not None

    @property
    def tensors(self) -> list[str]:
        """The tensors to observe in each step."""
        return [tensor for group in self._groups for tensor in group]

    def see(self, place: str, values: Sequence[Array]) -> None:
        """Check the values of one step."""
        rest = iter(values)
        gradients, before, after, (result, *_) = [[next(rest) for _ in group] for group in self._groups]
        found = self._missed(before) or self._error([g.astype(np.float64) for g in gradients], before, after, result)
        self._last = after
        if found.error > self._worst.error or not self._worst.max_abs:
            self._worst = found._replace(where=", ".join(filter(None, (place, found.where))) if found.error else "")

    def row(self) -> ComparedTensor:
        """Return the row of the report."""
        one, worst = self._one, self._worst
        name = f"{one.owner} by {shown(one.compressor)}{self._device}"
        return ComparedTensor(name, KIND, worst.error, worst.max_abs, worst.where, worst.error <= self._allowed.rtol)

    def _missed(self, before: Sequence[Array]) -> Deviation | None:
        """Return an infinite deviation if a step did not begin with the residuals of the last one (at first, zero)."""
        left = self._last or [np.zeros_like(residual) for residual in before]
        for replica, (has, had) in enumerate(zip(before, left, strict=True)):
            if not np.array_equal(has, had):
                return Deviation(float("inf"), _largest(had), f"the residual of replica {replica} was not kept")
        return None

    def _error(
        self, gradients: Sequence[Array], before: Sequence[Array], after: Sequence[Array], result: Array
    ) -> Deviation:
        codec = self._codec
        if not codec.error_feedback:
            sent = [np.asarray(codec.sent(gradient, len(gradients))) for gradient in gradients]
            return self._compared(result, sent, result)
        total = [gradient + residual for gradient, residual in zip(gradients, before, strict=True)]
        for replica, (had, back) in enumerate(zip(total, after, strict=True)):
            if not np.isfinite(back).all():
                return Deviation(float("inf"), 0.0, f"the residual of replica {replica} is not finite")
            if np.isfinite(had).all() and not _norm(back) <= codec.most_kept(had, len(total)) * _SLACK + 1e-30:
                return Deviation(float("inf"), _largest(had), f"replica {replica} keeps too much back")
        finite = np.isfinite(sum(gradients))
        if not finite.all():
            if np.isfinite(result).all():
                return Deviation(float("inf"), 0.0, "a gradient that is not finite has become finite")
            finite &= not codec.spreads
        got = np.where(finite, result + sum(residual.astype(np.float64) for residual in after), 0.0)
        return self._compared(got, [np.where(finite, term, 0.0) for term in total], result)

    def _compared(self, got: Array, terms: Sequence[Array], result: Array) -> Deviation:
        """Compare with the sum of terms, relative to the largest term, because terms may cancel out in the sum."""
        expected = np.asarray(sum(terms))
        kind = np.float64 if result.dtype == np.float64 else np.float32
        with np.errstate(all="ignore"):
            near = np.abs(got - expected) <= self._rounding(terms, result)
            got = np.where(near, expected, got).astype(kind)
            found = self._allowed.deviation(got, expected.astype(kind))
        size = max(_largest(term) for term in terms)
        return found._replace(error=found.error * found.max_abs / size) if size > found.max_abs > 0 else found

    def _rounding(self, terms: Sequence[Array], result: Array) -> Array:
        """Return the largest rounding error of adding the terms in the type of the codes, and of the result's type."""
        allowed: Array = np.zeros(terms[0].shape)
        codec, lowered = self._codec, self._lowering
        is_exact = lowered.does(Operation.GATHER) or (lowered.is_local and codec.gather_up_to)
        if codec.added_bits is not None and not is_exact:
            size = np.sum(np.abs(np.asarray(terms)), axis=0)
            allowed = (len(terms) - 1) * (2.0**-codec.added_bits * size + _TINY * len(terms))
        return allowed + (epsilon(result) * np.abs(result.astype(np.float64)) if epsilon(result) > 1e-4 else 0.0)


def _largest(array: Array) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def _norm(array: Array) -> float:
    return float(np.linalg.norm(array.ravel()))
