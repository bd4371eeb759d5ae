"""Function mode: run a training function on many devices, with the calls of the original.

Every new structure of arguments is traced, distributed and kept. The batch may have any size. If another axis changes,
the function is traced once more with its size unknown, as `reduce_retracing` does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from autograph_rewrite.diagnostics.amounts import few
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.load.functions import from_function, output_leaves
from autograph_rewrite.notebook import NotebookView
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine.batch_sizes import FirstBatch
from autograph_rewrite.runtime.engine.step_observers import StepObserver, observers
from autograph_rewrite.runtime.function.arguments import (
    COMPOSITES,
    ArgumentLeaf,
    Arguments,
    Flat,
    Opens,
    accepts,
    common,
)
from autograph_rewrite.runtime.function.mirrored_variables import Mirrors, trackable
from autograph_rewrite.runtime.function.session_step import SessionStep
from autograph_rewrite.runtime.function.step import BoundStep, batch_axes
from autograph_rewrite.runtime.job.digests import Telling, nothing
from autograph_rewrite.runtime.job.own_loop import FunctionSteps
from autograph_rewrite.training_graph import RewrittenTrace, TrainingGraph

MakesItem = Callable[..., TrainingGraph]


class _Traced(NamedTuple):
    """One trace: the arguments that it accepts, and its step."""

    structure: Hashable
    leaves: list[ArgumentLeaf]
    original: TrainingGraph
    step: BoundStep | SessionStep
    pack: Callable[[list[Any]], Any]
    first: FirstBatch


def _require_elements(tf: Any, values: Sequence[Any], error: Exception) -> None:
    """Raise OutOfRangeError in place of a cancelled step where one of its iterators has ended.

    When one device finds the end of the data, the devices that wait for it are cancelled, and TensorFlow reports any of
    their errors. If there are more data, the element that this draws belongs to a step that has failed anyway.
    """
    for value in values if tf.executing_eagerly() else ():
        if isinstance(value, tf.data.Iterator) and not bool(value.get_next_as_optional().has_value()):
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from error


class DistributedFunction(NotebookView):
    """A function that runs one training step over all replicas, with the arguments and results of the original.

    Args:
        function: a tf.function, or a plain function that uses tf.Variables.
        rewrite: distributes one traced item; takes `bucket_order`.
        specs: of the arguments; None to trace for the arguments of each call.
        batch_inputs: axis by argument path.
        mirrors: the copies of variables; shared by functions of the same variables.
        trace: makes an item of the function and specs.
        telling: returns the account of other values that must be equal in all workers in a step.
        tells: whether to print the coverage at the first call.
        steps: how many steps one call does at most; several are given as the rows of the arguments.
        opens: opens more dimensions of the leaves that are traced, given their paths.
        elastic: saves and restores the variables in an elastic job.

    Attributes:
        observer: observes every step that is not part of another function.
    """

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> DistributedFunction:
        """Make an object that `tf.train.Checkpoint` takes."""
        made: DistributedFunction = object.__new__(trackable(cls) if cls is DistributedFunction else cls)
        return made

    def __init__(
        self,
        function: Callable[..., Any],
        rewrite: MakesItem,
        specs: Sequence[Any] | None = None,
        named_specs: Mapping[str, Any] | None = None,
        *,
        batch_inputs: Mapping[str, int | None] | None = None,
        mirrors: Mirrors | None = None,
        trace: MakesItem = from_function,
        telling: Telling = nothing,
        tells: bool = True,
        steps: int = 1,
        opens: Opens | None = None,
        elastic: FunctionSteps | None = None,
    ) -> None:
        functools.update_wrapper(self, getattr(function, "python_function", function), updated=())
        self._tf = tensorflow()
        self._function = function
        self._rewrite = rewrite
        self._batch_inputs = batch_inputs
        self._mirrors = mirrors if mirrors is not None else Mirrors()
        self._trace, self._telling, self._tells, self._steps = trace, telling, tells, steps
        self._opens, self._elastic = opens, elastic
        self.observer: StepObserver | None = observers() if tells else None
        tracking: Any = self
        tracking._track_trackable(self.state, "state")
        self._arguments = Arguments(function, batch_inputs)
        self._run_unconverted = self._tf.autograph.experimental.do_not_convert(self._run)
        self._traces: list[_Traced] = []
        self._ahead: BoundStep | SessionStep | None = None  # the step that has run since variables were averaged
        self._known: dict[Hashable, _Traced] = {}
        self._specs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        declared = getattr(function, "input_signature", None)
        if hasattr(function, "structured_input_signature"):
            self._specs = function.structured_input_signature
        elif specs or named_specs:
            self._specs = self._arguments.bind(tuple(specs or ()), dict(named_specs or {}))
        given = self._specs
        if given is None and declared is not None:  # traced at the first call, as TensorFlow does
            self._specs = self._arguments.bind(declared, {})
        self._made_for = self._arguments.flatten(*self._specs).leaves if self._specs is not None else None
        if given is not None:
            self._add(*given)

    def __str__(self) -> str:
        name = getattr(self, "__name__", "function")
        told = []
        for report in (item.report for item in self.items):
            plan, covered = report.plan, report.covered
            devices = few(list(dict.fromkeys(parse(device).short for device in plan.devices)))
            where = f"{devices} of {plan.workers} processes" if plan.workers > 1 else devices
            told.append(f"{name}: {plan.strategy} ({plan.mode}) on {where}; {covered}")
        return "\n".join(told) or f"{name}: rewritten when it is called first"

    @property
    def items(self) -> tuple[TrainingGraph, ...]:
        """The rewritten items, one per trace, for `ar.dump` and `ar.explain`."""
        return tuple(traced.step.item for traced in self._traces)

    @property
    def traces(self) -> tuple[RewrittenTrace, ...]:
        """The original and the rewritten item of each trace."""
        return tuple(RewrittenTrace(traced.original, traced.step.item) for traced in self._traces)

    @property
    def state(self) -> Any:
        """A tf.Module with the variables that rewriting has added for each replica, as residuals of compressors."""
        return self._mirrors.state

    def average_variables(self) -> None:
        """With `local_sgd`, average the variables that replicas have trained by themselves; all workers call this.

        Raises:
            ClusterError: a worker is missing.
        """
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, BoundStep):
            ahead.average_variables()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, or with `steps_per_run` as many steps as the arguments have rows."""
        if self._tf.executing_eagerly():
            return self._run(args, kwargs)
        return self._run_unconverted(args, kwargs)  # autograph must not convert this code

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._arguments.bind(args, kwargs)
        if self._specs is not None:
            args, kwargs = self._arguments.cast((args, kwargs), self._specs)
        flat = self._arguments.flatten(args, kwargs)
        rows: list[bool] = []
        if self._steps > 1:
            paths = self._arguments.paths(args, kwargs)
            flat, rows = one_of_several(flat, paths, self._arguments, self._made_for, self._steps)
        key = (flat.structure, *flat.leaves)
        traced = self._known.get(key)
        if traced is None:
            traced = self._known[key] = self._find(flat, args, kwargs)
        if isinstance(traced.step, BoundStep) and self._tf.executing_eagerly():
            traced = self._reordered(traced, traced.step)
        tensors = self._tensors(flat)
        if not traced.first.is_done:
            traced.first(traced.step.examples(tensors, rows))
        if self._elastic is not None:
            self._elastic.before(traced.original)
        try:
            results = self._observed(traced, tensors, rows)
        except self._tf.errors.CancelledError as error:
            _require_elements(self._tf, flat.values, error)
            raise
        self._ahead = traced.step
        if self._elastic is not None:
            self._elastic.after()
        return results

    def _observed(self, traced: _Traced, tensors: list[Any], rows: list[bool]) -> Any:
        """Run one step, and report it to the observer, if there is one."""
        if self.observer is None or not self._tf.executing_eagerly():
            return traced.pack(traced.step(tensors, rows))
        what, examples = RewrittenTrace(traced.original, traced.step.item), traced.step.examples(tensors, rows)
        if True in rows:  # several steps
            examples = (examples or 0) * int(tensors[rows.index(True)].shape[0])
        with self.observer.step(what, examples):
            return traced.pack(traced.step(tensors, rows))

    def _tensors(self, flat: Flat) -> list[Any]:
        """Return the values, with iterators, sparse and ragged tensors expanded to their tensors."""
        if all(leaf.dtype is not None for leaf in flat.leaves):
            return flat.values
        parts: list[Any] = self._tf.nest.flatten(flat.values, expand_composites=True)
        return parts

    def _find(self, flat: Flat, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Traced:
        """Return a trace for arguments of new types and shapes: an existing one, or a new one."""
        if self._specs is not None and not self._traces:
            self._add(*self._specs)
        similar = [traced for traced in self._traces if traced.structure == flat.structure]
        for traced in similar:
            if accepts(traced.leaves, flat.leaves):
                return traced
        if self._specs is not None:
            raise GraphError(
                f"the step was made for ({_listed(self._traces[0].leaves)}), not for ({_listed(flat.leaves)})",
                hint="leave out the specs of ar.distribute, or the input_signature of tf.function, to have it traced "
                "for whatever it is called with",
            )
        paths = self._arguments.paths(args, kwargs)
        leaves = self._arguments.relaxed(flat.leaves, paths)
        if self._opens is not None:
            leaves = self._opens(leaves, paths)
        for traced in similar:
            leaves = common(traced.leaves, leaves) or leaves
        specs, named = self._arguments.specs(args, kwargs, leaves)
        return self._add(tuple(specs), named)

    def _step(self, item: TrainingGraph) -> BoundStep | SessionStep:
        """Return the step that runs a rewritten item."""
        report = item.report
        is_on_server = report is not None and report.member is not None and (report.plan.homes or report.plan.is_driven)
        what = f"'{getattr(self, '__name__', 'step')}'"
        return SessionStep(item, self._mirrors) if is_on_server else BoundStep(item, self._mirrors, what, self._telling)

    def _add(self, specs: Sequence[Any], named: Mapping[str, Any]) -> _Traced:
        """Trace, distribute and keep the function for specs."""
        eager = self._tf.__internal__.eager_context.eager_mode  # captures of a trace have to be eager tensors
        with contextlib.nullcontext() if self._tf.executing_eagerly() else eager():
            item = self._trace(self._function, *specs, batch_inputs=self._batch_inputs, **named)
            step = self._step(self._rewrite(item))
        flat = self._arguments.flatten(specs, named)
        first = FirstBatch(step.item)
        if not self._tells:
            first.done()
        axes = {index: axis for _, index, axis in batch_axes(item, step.binding)}  # whose sizes the step checks
        leaves = self._arguments.opened(flat.leaves, axes)
        traced = _Traced(flat.structure, leaves, item, step, _packer(self._tf, step), first)
        self._traces.append(traced)
        return traced

    def _reordered(self, traced: _Traced, step: BoundStep) -> _Traced:
        """Rewrite a step again once the order is known in which gradients are ready; return its trace."""
        order = step.learnt_order()
        if not order:
            return traced
        new = self._step(self._rewrite(traced.original, bucket_order=order))
        assert isinstance(new, BoundStep)
        new.follow(step)
        changed = traced._replace(step=new)
        self._traces = [changed if one is traced else one for one in self._traces]
        self._known = {key: changed if one is traced else one for key, one in self._known.items()}
        return changed


def _listed(leaves: Sequence[ArgumentLeaf]) -> str:
    return ", ".join(
        f"{leaf.dtype.name}{list(leaf.shape) if leaf.shape is not None else ''}" if leaf.dtype else str(leaf.static)
        for leaf in leaves
    )


def _packer(tf: Any, step: BoundStep | SessionStep) -> Callable[[list[Any]], Any]:
    """Return a function that nests flat results as the original function does."""
    structure = step.binding.structured_outputs
    if structure is None:
        return lambda flat: None
    leaves = tf.nest.flatten(structure, expand_composites=True)
    if len(leaves) == 1 and leaves[0] is structure:
        return lambda flat: flat[0]
    positions = [at for at, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
    assert len(positions) == len(list(output_leaves(structure)))
    if isinstance(structure, dict) and len(positions) == len(structure) == len(leaves):
        position = {key: at for at, key in enumerate(sorted(structure))}
        order = [(key, position[key]) for key in structure]
        return lambda flat: {key: flat[at] for key, at in order}

    def pack(flat: list[Any]) -> Any:
        filled = list(leaves)
        for at, value in zip(positions, flat, strict=True):
            filled[at] = value
        return tf.nest.pack_sequence_as(structure, filled, expand_composites=True)

    return pack


# The arguments of several steps in one call (`steps_per_run`): each step takes a row of the stacked arguments.
#
# step(x [3, 8, 4], y [3, 8], rate [])      three steps on batches of 8, with one rate
# step(iterator)                            as many steps as steps_per_run says, each on the next element


def one_of_several(
    flat: Flat, paths: Sequence[str], arguments: Arguments, made_for: Sequence[ArgumentLeaf] | None, most: int
) -> tuple[Flat, list[bool]]:
    """Return the arguments with the leaves of one step, and for each tensor whether it has one row per step.

    Args:
        arguments: gives the batch axes.
        made_for: the leaves of one step if specs were given; None: all arguments with examples have rows.
        most: how many steps one call does at most.

    Raises:
        GraphError: the arguments do not have equally many rows, too many or none, or cannot be cut into rows.
    """
    has = [
        _has_rows(leaf, arguments.axis(path, leaf) is not None, made_for[i] if made_for is not None else None)
        for i, (leaf, path) in enumerate(zip(flat.leaves, paths, strict=True))
    ]
    stacked = [(path, leaf.shape) for leaf, path, rows in zip(flat.leaves, paths, has, strict=True) if rows]
    counts = {path: shape[0] for path, shape in stacked if shape and shape[0] is not None}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"'{path}' {size}" for path, size in counts.items())
        raise GraphError(
            f"the steps of a call are the rows of its arguments, and these have different numbers: {listed}",
            hint="stack the batches of up to steps_per_run steps: [steps, batch, ...]; batch_inputs={name: None} says "
            "that an argument is the same in every step",
        )
    for path, size in counts.items():
        if not 1 <= size <= most:
            raise GraphError(f"'{path}' has rows for {size} steps, and steps_per_run is {most}")
    leaves = [
        leaf._replace(shape=leaf.shape[1:]) if rows and leaf.shape else leaf
        for leaf, rows in zip(flat.leaves, has, strict=True)
    ]
    return flat._replace(leaves=leaves), _of_tensors(flat, paths, has)


def _has_rows(leaf: ArgumentLeaf, holds_examples: bool, made_for: ArgumentLeaf | None) -> bool:
    if leaf.dtype is None or not leaf.shape:
        return False
    if made_for is not None:
        return made_for.shape is not None and len(leaf.shape) == len(made_for.shape) + 1
    return holds_examples


def _of_tensors(flat: Flat, paths: Sequence[str], has: Sequence[bool]) -> list[bool]:
    """Return for each tensor, including those of composite arguments, whether it has rows.

    Raises:
        GraphError: an argument is sparse or ragged.
    """
    found: list[bool] = []
    values = iter(flat.values)
    for leaf, path, rows in zip(flat.leaves, paths, has, strict=True):
        if leaf.dtype is not None:
            next(values)
            found.append(rows)
            continue
        kind = type(leaf.static).__name__
        if kind in COMPOSITES:
            hint = "give an iterator over a dataset, or set steps_per_run to 1"
            raise GraphError(f"'{path}' is given as {kind}, of which several cannot be stacked", hint=hint)
        if hasattr(leaf.static, "_to_components"):
            found += [False] * len(tensorflow().nest.flatten(next(values), expand_composites=True))
    return found
