"""Keras mode: make the steps of a model object run on all replicas.

Keras asks its model for a function before it trains, tests or predicts, and calls the function for every batch. The
model gets functions that run the rewritten `train_step`, `test_step` or `predict_step`. Keras does everything around
them, from data handling to callbacks and saving. The methods that make these functions are set on the instance without
Keras' attribute tracking, so they survive `compile` and are neither saved nor copied.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

from autograph_rewrite.diagnostics.faults import warn_user
from autograph_rewrite.errors import ClusterError, GraphError, RewriteError
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.load.functions import from_concrete, trace
from autograph_rewrite.load.keras_library import callbacks_of, count_steps, is_legacy, library_of, strategy_of, wraps
from autograph_rewrite.load.keras_models import require_usable, step_function
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.function.arguments import ArgumentLeaf, Opens, Shape
from autograph_rewrite.runtime.function.function import DistributedFunction
from autograph_rewrite.runtime.function.mirrored_variables import Mirrors
from autograph_rewrite.runtime.job.digests import is_told, nothing
from autograph_rewrite.runtime.job.stop import Stop
from autograph_rewrite.runtime.keras_workers import KerasJob
from autograph_rewrite.training_graph import TrainingGraph

Rewrite = Callable[..., TrainingGraph]
_MADE_BY = {"train": "make_train_function", "test": "make_test_function", "predict": "make_predict_function"}


def distribute_keras(
    model: Any, rewrite: Rewrite, batch_inputs: Mapping[str, int | None] | None, job: KerasJob | None, steps: int
) -> Any:
    """Make a compiled model train, test and predict over all replicas.

    Args:
        model: a compiled model, of Keras 3 on the TensorFlow backend or of tf_keras; it is changed and returned.
        rewrite: distributes one traced item; takes `training`.
        batch_inputs: axis by argument path ("x/image").
        job: in a job of several processes, this process's part.
        steps: the new `steps_per_execution` of the model; 1: it stays as it is.

    Raises:
        GraphError: the model cannot be distributed.
    """
    _check(model)
    _ModelSteps(model, rewrite, batch_inputs, job, steps).install()
    if job is not None:
        job.install(model)
    return model


def functions_of(model: Any) -> list[DistributedFunction]:
    """Return the functions that a distributed model has made so far, those of training first."""
    made = [getattr(model, f"{kind}_function", None) for kind in _MADE_BY]
    return [run for one in made if isinstance(one, (IteratorFunction, PredictFunction)) for run in one.functions]


def _check(model: Any) -> None:
    if getattr(vars(model).get("make_train_function"), "__module__", None) == __name__:
        raise GraphError(
            f"the model '{model.name}' is already distributed",
            hint="it stays so when it is compiled anew; for another configuration make the model anew",
        )
    require_usable(model)
    if strategy_of(model) is not None:
        raise GraphError(
            f"the model '{model.name}' was made in the scope of a tf.distribute strategy",
            hint="make it outside of the scope: the rewrite distributes single-device models",
        )


@dataclass
class _ModelSteps:
    """Makes the functions of one model; they share the mirrors of its variables."""

    model: Any
    rewrite: Rewrite
    batch_inputs: Mapping[str, int | None] | None
    job: KerasJob | None
    steps: int

    def __post_init__(self) -> None:
        self.mirrors, self.optimizer = Mirrors(), self.model.optimizer

    def install(self) -> None:
        """Give the model its new methods, and let it ask for new functions."""
        if self.steps > 1:
            self.model.steps_per_execution = self.steps
            if self.job is not None:
                warn_user(
                    f"steps_per_run: {self.steps} steps of a model run one after another where there are several "
                    "processes: each takes its part of a batch outside of the graph"
                )
        for kind, method in _MADE_BY.items():
            object.__setattr__(self.model, method, self._maker(kind))
            setattr(self.model, f"{kind}_function", None)

    def _maker(self, kind: str) -> Callable[..., Any]:
        """Return a replacement for `make_train_function` and the like."""

        def make(force: bool = False) -> Any:
            model, attribute = self.model, f"{kind}_function"
            if getattr(model, attribute) is None or force:
                setattr(model, attribute, self._function(kind))
            return getattr(model, attribute)

        make.__name__ = make.__qualname__ = _MADE_BY[kind]
        return make

    def _function(self, kind: str) -> Any:
        if self.model.run_eagerly:
            raise GraphError(
                f"the model '{self.model.name}' is compiled with run_eagerly=True, so it has no graph to distribute",
                hint="compile it with run_eagerly=False, or debug it before it is distributed",
            )
        if self.model.optimizer is not self.optimizer:  # compiled again: the copies of the old optimizer are useless
            self.mirrors, self.optimizer = Mirrors(), self.model.optimizer
        if kind == "predict":
            return PredictFunction(self, kind)
        if kind == "train" and self.steps > 1 and int(self.model.steps_per_execution) == 1:
            warn_user(
                f"'{self.model.name}' was compiled anew with steps_per_execution=1, so each run does one step: "
                f"compile it with steps_per_execution={self.steps} for steps_per_run"
            )
        return IteratorFunction(self, kind)


_NO_BATCH = 0
"""Marks, as a number of steps, the function that does the updates without a batch."""


def without_batch(item: TrainingGraph) -> TrainingGraph:
    """Return a step reduced to the updates that do not depend on its inputs: counters, seeds, decay."""
    node = item.graph.node
    waits = descendants(node(info.tensor.partition(":")[0]) for info in item.inputs.values())
    targets = tuple(name for name in item.targets if node(name) not in waits)
    binding = replace(item.binding, outputs=(), structured_outputs=None)
    return replace(item, targets=targets, outputs={}, binding=binding)


class _StepFunction:
    """Replaces a function of a model: runs the step on batches as Keras nests them, `(x,)`, `(x, y)` and so on."""

    def __init__(self, of: _ModelSteps, kind: str) -> None:
        self._tf = tensorflow()
        self._of, self._model, self._job, self._mirrors = of, of.model, of.job, of.mirrors
        self._kind, self._step, self._trains = kind, f"{kind}_step", kind == "train"
        self._on_one_device: Any = None
        self._by_form: dict[tuple[int, int], DistributedFunction] = {}
        self._last: tuple[int, Sequence[Any]] | None = None

    @property
    def items(self) -> tuple[TrainingGraph, ...]:
        """The rewritten items, one per trace."""
        return tuple(item for function in self.functions for item in function.items)

    @property
    def functions(self) -> tuple[DistributedFunction, ...]:
        """The distributed functions, one for each form of data."""
        return tuple(function for (_, steps), function in self._by_form.items() if steps != _NO_BATCH)

    @property
    def state(self) -> Any:
        """A tf.Module with the variables that rewriting has added, as residuals of compressors, for checkpoints."""
        return self._mirrors.state

    def _one(self, data: Any) -> Any:
        """Return the results of one batch; if evaluation or prediction cannot be distributed, by the model's step."""
        if self._on_one_device is None:
            try:
                return self._on_replicas(data)
            except RewriteError as error:
                if self._trains or isinstance(error, ClusterError):
                    raise
                verb = {"test": "evaluate", "predict": "predict"}[self._kind]
                warnings.warn(f"{verb} runs on one device: {error}", stacklevel=5)
            step = getattr(self._model, self._step)
            self._on_one_device = self._tf.function(step, autograph=is_legacy(self._model), reduce_retracing=True)
        return self._on_one_device(data)

    def _on_replicas(self, data: Any, steps: int = 1) -> Any:
        """Run the step on all replicas.

        Args:
            data: a batch; for several steps, one batch in each row.
            steps: how many rows there are at most; 1: `data` is one batch without rows.
        """
        data = self._without_optionals(data)
        if self._job is None:
            return self._run(data, steps)
        part = self._job.part(data, self._kind)
        try:
            result = self._run(part)
        except Exception as error:
            problem = self._job.problem(failed=True) if not is_told(error) else None
            if problem is not None:
                raise problem from error
            raise
        problem = self._job.problem()
        if problem is not None:
            raise problem
        return result

    def _run(self, data: Any, steps: int = 1) -> Any:
        parts = data if isinstance(data, tuple) and 1 <= len(data) <= 3 else None
        form = len(parts) if parts is not None else 0
        given = parts if parts is not None else (data,)
        if self._trains and steps == 1 and self._tf.executing_eagerly():
            self._last = form, given
        return self._function(form, steps)(*given)

    def _function(self, form: int, steps: int) -> DistributedFunction:
        if (form, steps) not in self._by_form:
            self._by_form[form, steps] = self._distributed(form, steps)
        return self._by_form[form, steps]

    def _at_end(self) -> None:
        """Do the updates that need no batch, as Keras does in a step on an iterator that has ended."""
        if self._last is None:
            return
        form, given = self._last
        try:
            self._require_one_state()
            self._function(form, _NO_BATCH)(*given)
        except ClusterError:
            raise
        except RewriteError as error:
            self._last = None
            warn_user(
                f"the data of '{self._model.name}' do not say how many batches they have: on one device Keras begins a "
                "step more where they end, which counts in optimizer.iterations, seeds and weight decay; here it does "
                f"not: {error.problem}. Say the length: tf.data.experimental.assert_cardinality"
            )

    def _require_one_state(self) -> None:
        """Refuse plans whose variables another function cannot update between two steps.

        Raises:
            GraphError: variables are on servers or with stages, or each replica has its own.
        """
        plans = [item.report.plan for item in self.items if item.report is not None]
        if any(plan.homes or plan.is_driven or plan.local_sgd is not None for plan in plans):
            raise GraphError("variables are on servers, with stages, or each replica's own (local_sgd)")

    def _distributed(self, form: int, steps: int) -> DistributedFunction:
        trains = self._trains and steps != _NO_BATCH
        function = step_function(self._model, self._step, form)
        function.__name__ = self._step  # for messages

        def traced(function: Any, *specs: Any, batch_inputs: Any = None) -> TrainingGraph:
            # As in Keras, version 3 has no autograph; without XLA, which compiles for one device.
            function = self._tf.function(function, autograph=is_legacy(self._model))
            concrete = trace(function, specs, {}, is_own=True)
            item = from_concrete(concrete, batch_inputs=batch_inputs, search=(self._model,), owner=self._model)
            return without_batch(item) if steps == _NO_BATCH else item

        return DistributedFunction(
            function,
            functools.partial(self._rewritten, training=trains),
            batch_inputs=self._batch_inputs_of(function),
            mirrors=self._mirrors,
            trace=traced,
            telling=self._job.tell if self._job is not None else nothing,
            tells=trains,
            steps=max(1, steps),
            opens=declared_lengths(self._model) if self._job is not None and not self._job.splits else None,
        )

    def _rewritten(self, item: TrainingGraph, **more: Any) -> TrainingGraph:
        new = self._of.rewrite(item, **more)
        if not self._model.jit_compile or new.report is None:
            return new
        note = Note(self._step, "jit_compile", "runs without XLA, which compiles a step for one device")
        return replace(new, report=replace(new.report, notes=(*new.report.notes, note)))

    def _batch_inputs_of(self, function: Callable[..., Any]) -> dict[str, int | None] | None:
        """Return the axes of this step's arguments: prediction has no y."""
        given = self._of.batch_inputs
        if given is None:
            return None
        names = inspect.signature(function).parameters
        return {path: axis for path, axis in given.items() if path.partition("/")[0] in names}

    def _without_optionals(self, data: Any) -> Any:
        """Return a batch with None for each Optional, which Keras puts for an omitted part of a nested input."""
        optional = self._tf.experimental.Optional
        if not any(isinstance(leaf, optional) for leaf in self._tf.nest.flatten(data)):
            return data
        return self._tf.nest.map_structure(lambda leaf: None if isinstance(leaf, optional) else leaf, data)


class IteratorFunction(_StepFunction):
    """A model's `train_function` or `test_function`: runs the step on the next batches of an iterator."""

    def __init__(self, of: _ModelSteps, kind: str) -> None:
        super().__init__(of, kind)
        self._drawn = Drawn(self._on_replicas)

    def __call__(self, iterator: Iterator[Any]) -> Any:
        """Run `steps_per_execution` steps, fewer at the end of the data; return the last results.

        In one process, training steps run in a loop inside the graph.

        Raises:
            StopIteration: there was no batch left.
        """
        with Stop.here().one_step(self) if self._trains else nullcontext():
            outputs, count = None, int(self._model.steps_per_execution)
            if count == 1 or not self._trains or self._job is not None:
                for data in islice(iterator, count):
                    outputs = self._one(data)
            elif self._drawn.takes(iterator):
                outputs = self._drawn(iterator, count)
            else:
                for rows, are_stacked in stacked(islice(iterator, count)):
                    outputs = self._on_replicas(rows, count if are_stacked else 1)
            if outputs is None:
                if count == 1 and self._trains and not self._model.jit_compile:
                    self._at_end()
                raise StopIteration
            count_steps(self._model, self._kind, count)
            return outputs


class PredictFunction(_StepFunction):
    """A model's `predict_function`: runs the step on a list of batches and joins the results."""

    def __call__(self, given: Iterable[Any]) -> Any:
        """Return the predictions for all batches, in order.

        Args:
            given: the batches, or an iterator over those of all calls.

        Raises:
            StopIteration: there was no batch left.
        """
        batches = list(islice(iter(given), int(self._model.steps_per_execution)))
        if not batches:
            raise StopIteration
        outputs = [self._one(data) for data in batches]
        count_steps(self._model, self._kind, len(batches))
        if len(outputs) == 1:
            return outputs[0]
        return self._tf.nest.map_structure(lambda *parts: self._tf.concat(parts, 0), *outputs)


# The dimensions that a Keras model leaves open: workers with sequences of different lengths must trace the same step.
#
# Input((None, 4))   batch float64[2, 3, 4]    traced for [None, 3, 4]       by this worker alone
# [None, None, 4]    where others may have other lengths


def declared_lengths(model: Any) -> Opens:
    """Return a function that opens those dimensions of a batch's leaves that the model's inputs and outputs leave open.

    Args:
        model: a Keras model; if its inputs are not declared, the function changes nothing.
    """
    inputs, outputs = _shapes(model, "inputs"), _shapes(model, "outputs")

    def opened(leaves: Sequence[ArgumentLeaf], paths: Sequence[str]) -> list[ArgumentLeaf]:
        found = list(leaves)
        for part, shapes in (("x", inputs), ("y", outputs), ("sample_weight", outputs)):
            at = [i for i, path in enumerate(paths) if path.partition("/")[0] == part]
            if len(at) == len(shapes):
                for i, shape in zip(at, shapes, strict=True):
                    found[i] = _opened(leaves[i], shape)
        return found

    return opened


def _shapes(model: Any, which: str) -> list[Shape]:
    try:
        tensors = tensorflow().nest.flatten(getattr(model, which))
        return [tuple(tensor.shape) for tensor in tensors]
    except (AttributeError, ValueError, TypeError):  # a subclassed model, or one that is not built
        return []


def _opened(leaf: ArgumentLeaf, declared: Shape) -> ArgumentLeaf:
    """Return a leaf with the open dimensions of a declared shape; labels may have fewer dimensions than outputs."""
    if leaf.shape is None or declared is None or len(leaf.shape) > len(declared):
        return leaf
    return leaf._replace(
        shape=tuple(None if told is None else size for size, told in zip(leaf.shape, declared, strict=False))
    )


# Several steps in one call of a model's training function (`steps_per_run`, and Keras' `steps_per_execution`).
#
# Drawn      an iterator of dense batches: the loop in the graph draws them, and ends where the data do
# stacked    other batches: those that follow each other with one shape become rows
#
# [32, 8] [32, 8] [32, 8] [7, 8]   ──►   [3, 32, 8]   [1, 7, 8]


class Drawn:
    """Draws batches in a loop in the graph, and runs a step on each; returns the last step's results.

    The first step runs outside of the loop: its results give the types and the structure of the loop's results.

    Args:
        step: runs one step on a batch, or adds it to a graph.
    """

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self._tf = tensorflow()
        self._step = step
        self._results: Any = None
        self._loop = self._tf.function(self._several, autograph=False)

    def takes(self, iterator: Any) -> bool:
        """Return whether the graph can draw from an iterator: one of tf.data, of dense tensors alone."""
        tf = self._tf
        if not hasattr(iterator, "get_next_as_optional"):
            return False
        specs = tf.nest.flatten(iterator.element_spec)
        return all(isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None for spec in specs)

    def __call__(self, iterator: Any, count: int) -> Any:
        """Run up to `count` steps; None if there was no batch left."""
        tf = self._tf
        if self._results is None:
            data = next(iterator, None)
            if data is None:
                return None
            self._results, count = self._step(data), count - 1
            self._loop.get_concrete_function(iterator, tf.constant(count))  # the step has made all variables by now
        else:
            data = None
        done, results = self._loop(iterator, tf.constant(count))
        if not done and data is None:
            return None
        return tf.nest.pack_sequence_as(self._results, results) if done else self._results

    def _several(self, iterator: Any, count: Any) -> tuple[Any, list[Any]]:
        """Return the number of steps done, and the flat results of the last step."""
        tf = self._tf

        def drawn(number: Any) -> Any:
            none = tf.experimental.Optional.empty
            return tf.cond(number < count, iterator.get_next_as_optional, lambda: none(iterator.element_spec))

        def one_step(number: Any, batch: Any, *_: Any) -> list[Any]:
            results = [tf.identity(result) for result in tf.nest.flatten(self._step(batch.get_value()))]
            with tf.control_dependencies(results):
                number = number + 1
            return [number, drawn(number), *results]

        types = [tf.convert_to_tensor(result).dtype for result in tf.nest.flatten(self._results)]
        number, _, *results = tf.while_loop(
            lambda _, batch, *__: batch.has_value(),
            one_step,
            [tf.constant(0), drawn(tf.constant(0)), *(tf.zeros([], dtype) for dtype in types)],
            shape_invariants=[
                tf.TensorShape([]),
                tf.OptionalSpec(iterator.element_spec),
                *(tf.TensorShape(None) for _ in types),
            ],
            parallel_iterations=1,
        )
        return number, results


def stacked(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield consecutive batches of equal shapes stacked as one, and whether it is stacked.

    Args:
        batches: as Keras nests them; those with sparse or ragged parts are not stacked.
    """
    tf = tensorflow()

    def stack(*parts: Any) -> Any:
        return None if parts[0] is None else tf.stack(parts)

    for form, group in groupby(batches, _form):
        if form is None:
            yield from ((batch, False) for batch in group)
        else:
            yield tf.nest.map_structure(stack, *group), True


def _form(batch: Any) -> Hashable:
    """Return types and shapes of a batch, equal for batches that can be stacked; None if it cannot be stacked."""
    tf = tensorflow()
    leaves = tf.nest.flatten(batch)
    if not all(leaf is None or isinstance(leaf, tf.Tensor) for leaf in leaves):
        return None
    return tuple((leaf.dtype, tuple(leaf.shape)) if leaf is not None else None for leaf in leaves)


# A model with `local_sgd` averages its variables at the end of an epoch, and before it evaluates or predicts.
#
# step ─► step ─► ... ─► averaged ─► validation ─► logs of the epoch ─► callbacks: checkpoints save what all have

AVERAGED = ("get_metrics_result", "evaluate", "predict", "test_on_batch", "predict_on_batch")
"""Methods that read the model's variables; `get_metrics_result` is called at the end of an epoch."""


def average_in_fit(model: Any) -> None:
    """Let a model average its replicas' variables before the metrics and callbacks of an epoch's end."""
    object.__setattr__(model, "fit", _fitting(model, model.fit))
    for name in AVERAGED:
        object.__setattr__(model, name, _averaged(model, getattr(model, name)))


def average(model: Any) -> None:
    """Average the variables that the replicas of a distributed model have trained by themselves."""
    for function in functions_of(model):
        function.average_variables()


def _averaged(model: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if tensorflow().executing_eagerly():  # not while a step is traced, which may call these methods, too
            average(model)
        return method(*args, **kwargs)

    return called


def _fitting(model: Any, fit: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fit)
    def fitted(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(fit).bind(*args, **kwargs)
        call.apply_defaults()
        averages = library_of(model).callbacks.LambdaCallback(on_epoch_end=lambda *_: average(model))
        call.arguments["callbacks"] = [averages, *callbacks_of(call.arguments.get("callbacks"))]
        return fit(*call.args, **call.kwargs)

    return fitted
