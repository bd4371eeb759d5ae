"""Take the graph from a script (`train.py` or `train.py:model`): the step that it would train, with its data.

The script runs as under `python`, up to its first training step: a `fit` or `train_on_batch` of a Keras model, a call
of a result of `ar.distribute`, or `ar.rewrite` of a graph. That step is the graph, and the script ends there. With a
name after the colon, it is the first step of the model or function in a variable of that name; others are skipped.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from traceback import walk_stack, walk_tb
from typing import Any, NoReturn
from unittest import mock

import autograph_rewrite as ar
from autograph_rewrite import api
from autograph_rewrite.errors import GraphError

_SCRIPT = re.compile(r"(.+\.py)(?::(\w+))?")
_HINT = "it has to call fit, what ar.distribute returned, or ar.rewrite; train.py:NAME names one of several"


def load_script(graph: str, batch_inputs: dict[str, int | None] | None = None) -> tuple[ar.GraphItem, int | None]:
    """Run a script up to its first training step, and return that step with the examples that a `fit` gives it.

    Args:
        graph: `PATH.py` or `PATH.py:NAME`.
        batch_inputs: axis of the examples by input.

    Raises:
        GraphError: the script does not exist, failed, or ended without a training step of that name.
    """
    found = _SCRIPT.fullmatch(graph)
    assert found is not None
    path, name = Path(found[1]), found[2]
    if not path.is_file():
        raise GraphError(f"there is no script '{path}'", hint="give the path of a Python file, or of a graph")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    try:
        with _stopped_at_training(_libraries(path), name), contextlib.redirect_stdout(sys.stderr), _as_main(path):
            runpy.run_path(str(path), run_name="__main__")
    except _Found as one:
        return one.item(batch_inputs), one.examples
    except SystemExit as end:
        if end.code:
            raise GraphError(f"'{path}' ended with exit code {end.code} before it trained", hint=_HINT) from None
    except ar.RewriteError:
        raise
    except Exception as error:
        where = _line_of(error, path)
        raise GraphError(f"'{path}' failed before it trained: {type(error).__name__}: {error}", where=where) from error
    what = f"never trained '{name}'" if name else "trained nothing"
    raise GraphError(f"'{path}' {what}, so there is no step to look at", hint=_HINT)


class _Found(BaseException):
    """Ends the script at its training step; `except Exception` in the script does not catch it."""

    def __init__(
        self, item: Callable[[dict[str, int | None] | None], ar.GraphItem], examples: int | None = None
    ) -> None:
        super().__init__("the step was found")
        self.item, self.examples = item, examples


@contextmanager
def _stopped_at_training(libraries: Sequence[Any], name: str | None) -> Iterator[None]:
    """Make each way to train end the script."""
    with ExitStack() as stack:
        for library in libraries:
            for method in ("fit", "train_on_batch"):
                original = getattr(library.Model, method)
                stack.enter_context(mock.patch.object(library.Model, method, _taken(original, library, name)))
            stack.enter_context(mock.patch.object(library.Model, "make_train_function", _at_data(library)))
        models = tuple(library.Model for library in libraries)
        for module in (ar, api):
            stack.enter_context(mock.patch.object(module, "distribute", _distribute(models, name)))
            stack.enter_context(mock.patch.object(module, "rewrite", _rewrite))
        yield


def _libraries(path: Path) -> list[Any]:
    """Return Keras, and tf_keras if the script names it or `tf.keras` is tf_keras."""
    legacy = "tf_keras" in path.read_text(encoding="utf-8", errors="replace") or os.environ.get("TF_USE_LEGACY_KERAS")
    return [importlib.import_module(name) for name in (("keras", "tf_keras") if legacy else ("keras",))]


def _taken(original: Any, library: Any, name: str | None) -> Any:
    """Return a replacement for `fit` that ends at the first batch, and skips models of other names."""

    def method(model: Any, *args: Any, **options: Any) -> Any:
        if not _is_named(model, name):
            return library.callbacks.History() if original.__name__ == "fit" else 0.0
        model.train_function = None
        return original(model, *args, **{key: value for key, value in options.items() if key != "callbacks"})

    return method


def _at_data(library: Any) -> Any:
    """Return a replacement for `make_train_function`, whose function ends the script at the first batch."""

    def make_train_function(model: Any, force: bool = False) -> Any:
        def train_function(data: Any) -> NoReturn:
            drawn, spec = next(iter(data)), getattr(data, "element_spec", None)
            batch = library.utils.unpack_x_y_sample_weight(drawn if spec is None else spec)
            given = [_of_any_batch(part) for part in batch]
            while given[-1] is None:
                given.pop()
            examples = _examples(library.utils.unpack_x_y_sample_weight(drawn)[0])
            raise _Found(lambda inputs: ar.GraphItem.from_keras(model, *given, batch_inputs=inputs), examples)

        model.train_function = train_function
        return train_function

    return make_train_function


def _examples(x: Any) -> int | None:
    """Return the number of examples in the inputs of a model; None where it is unknown."""
    import tensorflow as tf

    shape = tf.TensorShape(getattr(next(iter(tf.nest.flatten(x)), None), "shape", None))
    return shape[0] if shape.rank else None


def _distribute(libraries: tuple[Any, ...], name: str | None) -> Any:
    """Return a replacement for `ar.distribute`: it returns a model unchanged; a function's first call is its step."""

    def distribute(target: Any, config: Any = None, *specs: Any, batch_inputs: Any = None, **named_specs: Any) -> Any:
        if isinstance(target, libraries):
            return target

        def step(*args: Any, **named: Any) -> None:
            if name != getattr(target, "__name__", None) and not _is_named(target, name) and not _is_named(step, name):
                return
            given, keywords = (specs, named_specs) if specs or named_specs else (args, named)
            shapes, known = tuple(map(_of_any_batch, given)), {key: _of_any_batch(one) for key, one in keywords.items()}
            raise _Found(
                lambda inputs: ar.GraphItem.from_function(target, *shapes, batch_inputs=inputs or batch_inputs, **known)
            )

        return step

    return distribute


def _rewrite(item: Any, *_: Any, **__: Any) -> NoReturn:
    raise _Found(lambda inputs: ar.GraphItem.of(item))


def _is_named(one: Any, name: str | None) -> bool:
    """Return whether a variable of this name holds an object, in any frame of the stack; None: any object counts."""
    if name is None:
        return True
    frames = (frame for frame, _ in walk_stack(sys._getframe(2)))
    return any(scope.get(name) is one for frame in frames for scope in (frame.f_locals, frame.f_globals))


def _of_any_batch(part: Any) -> Any:
    """Return the specs of a part of a batch, with an unknown batch size."""
    import tensorflow as tf

    from autograph_rewrite.load.functions import of_any_batch

    def opened(spec: Any) -> Any:
        dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if dense else spec

    return tf.nest.map_structure(opened, of_any_batch(part))


@contextmanager
def _as_main(path: Path) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as Python does for the script."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(path)], [str(path.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def _line_of(error: Exception, path: Path) -> str | None:
    """Return the innermost line of the script in an error's traceback."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else None
