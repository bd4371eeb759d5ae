"""Trace a tf.function, or a plain function over tf.Variables, to a TrainingGraph with captures as placeholders."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, unique_among
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.load.graphs import read
from autograph_rewrite.load.inputs import describe, named_batches
from autograph_rewrite.load.keras_library import path_of
from autograph_rewrite.load.marks import mark_checkpoints
from autograph_rewrite.load.variables import Capture, FunctionBinding, declared, from_tf_graph
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph, Variable


def from_function(
    function: Any, *specs: Any, batch_inputs: Mapping[str, int | None] | None = None, **named_specs: Any
) -> TrainingGraph:
    """Trace a function. See `GraphItem.from_function`.

    Args:
        *specs: specs or arrays, nested as the arguments are.
        batch_inputs: axis of the examples by input; None: an input has none.
        **named_specs: the same for keyword arguments.

    Raises:
        GraphError: the function cannot be traced with these specs, or `batch_inputs` does not fit them.
    """
    concrete = trace(function, specs, named_specs)
    return from_concrete(concrete, batch_inputs=batch_inputs, search=(function,), first=first_trace(function))


def trace(function: Any, specs: Sequence[Any], named_specs: Mapping[str, Any], *, is_own: bool = False) -> Any:
    """Return the ConcreteFunction of a function for specs, or for arrays, whose shapes it then fixes.

    Args:
        function: a Python function, tf.function or ConcreteFunction.
        is_own: only this package has a reference to the tf.function.

    Raises:
        GraphError: it is not callable, or tracing raised.
    """
    import tensorflow as tf

    if hasattr(function, "structured_input_signature") and hasattr(function, "graph"):
        return function
    if not callable(function):
        raise GraphError(f"expected a function to trace, not {type(function).__name__}")
    is_own = is_own or not hasattr(function, "get_concrete_function")
    traceable = function if hasattr(function, "get_concrete_function") else tf.function(function)
    named = {name: as_spec(spec) for name, spec in named_specs.items()}
    try:
        concrete = traceable.get_concrete_function(*map(as_spec, specs), **named)
    except Exception as error:  # whatever the user's code raises while it is traced
        name = getattr(function, "__name__", type(function).__name__)
        raise GraphError(
            f"'{name}' cannot be traced: {type(error).__name__}: {str(error).strip()[:4000]}",
            hint="give one spec per argument, as tf.TensorSpec, nested like the argument",
        ) from error
    first = first_trace(traceable)
    if is_own and first is not None and first is not concrete:
        _let_go(first)
    return concrete


def first_trace(function: Any) -> Any:
    """Return the trace in which a tf.function makes its variables; if it made any, tf.function traces again."""
    return getattr(function, "_concrete_variable_creation_fn", None)


def _let_go(concrete: Any) -> None:
    """Release the captures of a trace that is never called, because its graph is never freed."""
    captures: Any = getattr(concrete.graph, "_function_captures", None)
    if hasattr(captures, "clear"):
        concrete.set_external_captures([])
        captures.clear()
        _ = concrete.graph.captures  # its cached list is renewed only when it is read after a change


def from_concrete(
    concrete: Any,
    *,
    batch_inputs: Mapping[str, int | None] | None = None,
    search: Sequence[Any] = (),
    owner: Any = None,
    first: Any = None,
) -> TrainingGraph:
    """Wrap a ConcreteFunction.

    Args:
        batch_inputs: axis by argument path.
        search: objects from which the captured Keras variables can be reached.
        owner: an object that must stay alive with the item.
        first: the result of `first_trace`.

    Raises:
        GraphError: there is a deferred capture, or `batch_inputs` does not fit.
    """
    traced = concrete.graph
    if traced.deferred_external_captures:
        raise GraphError("the function captures a value that only exists at call time (a deferred capture)")
    graph = read(traced)
    mark_checkpoints(graph, from_tf_graph(traced).checkpoints)
    _order_controls(graph)
    arguments = [tensor.op.name for tensor in concrete.inputs[: len(concrete.inputs) - len(traced.captures)]]
    names = _rename_captures(graph, [internal.op.name for _, internal in traced.captures])
    captures = _captures(traced, keras_variables(*search), names)
    inputs, composite = _inputs(graph, concrete, arguments)
    results = [_renamed(tensor.name, names) for tensor in concrete.outputs]
    outputs = _outputs(graph, concrete, results)
    binding = FunctionBinding(
        concrete=concrete,
        captures=captures,
        structured_outputs=concrete.structured_outputs,
        inputs=tuple(arguments),
        outputs=tuple(results),
        owner=owner,
        first=first if first is not concrete else None,
    )
    effects = {op.name for op in traced.control_outputs if not has(op.type, "reads_whole", "inspects")}
    return TrainingGraph(
        graph,
        inputs=named_batches(inputs, batch_inputs, composite),
        outputs=outputs,
        targets=tuple(name for name in graph.nodes if name in effects),
        variables={capture.name: _variable(capture) for capture in captures if capture.name is not None},
        binding=binding,
    )


def _rename_captures(graph: Graph, nodes: Iterable[str]) -> dict[str, str]:
    """Rename captures whose names end in a counter of TensorFlow; return the new names of all.

    The capture of a Keras embedding, for example, is `embedding_lookup/50`, where 50 counts all tensors made before.
    The new name has the index of the capture, which is the same in every process.
    """
    names = {}
    for index, node in enumerate(nodes):
        scope, _, last = node.rpartition("/")
        names[node] = node
        if last.isdecimal() and node in graph.nodes:
            names[node] = graph.unique_name(f"{scope}/capture_{index}" if scope else f"capture_{index}")
            take_name(graph, graph.nodes[node], names[node])
    moved = {f"loc:@{old}".encode(): f"loc:@{new}".encode() for old, new in names.items() if old != new}
    for reader in graph if moved else ():
        together = reader.attr("_class", None)
        if together and any(place in moved for place in together):
            places = [moved.get(place, place) for place in together]
            reader.set_raw_attr("_class", encode("list(string)", places))
    return names


def _renamed(tensor: str, names: Mapping[str, str]) -> str:
    node, colon, index = tensor.partition(":")
    return names.get(node, node) + colon + index


def _order_controls(graph: Graph) -> None:
    """Put control edges into graph order, because TensorFlow's tracer takes them from sets, in random order."""
    position = {node: index for index, node in enumerate(graph)}
    for node in graph:
        controls = node.controls
        ordered = sorted(controls, key=position.__getitem__)
        if list(controls) != ordered:
            for control in controls:
                node.remove_control(control)
            for control in ordered:
                node.add_control(control)


def _inputs(graph: Graph, concrete: Any, arguments: Sequence[str]) -> tuple[dict[str, TensorInfo], frozenset[str]]:
    """Return the arguments and the elements of iterators, by path, and the paths of parts of composite tensors."""
    args, kwargs = concrete.structured_input_signature
    names = list(concrete.function_type.parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    # TensorFlow flattens keyword arguments in the order of the signature, not of the call.
    flat = [leaf for name in names if name in given for leaf in leaves(given[name], name)]
    paths = [leaf.path for leaf in flat]
    if len(paths) != len(arguments):
        paths = list(arguments)
    inputs = {path: describe(path, graph.node(node).output()) for path, node in zip(paths, arguments, strict=True)}
    for node in graph:
        if has(node.op, "input_elements"):
            inputs |= {value.name: describe(value.name, value) for value in node.outputs}
    return inputs, frozenset(leaf.path for leaf in flat if not leaf.dense)


def _outputs(graph: Graph, concrete: Any, results: Sequence[str]) -> dict[str, TensorInfo]:
    paths = [leaf.path for leaf in output_leaves(concrete.structured_outputs)]
    if len(paths) != len(concrete.outputs):
        paths = [f"output_{i}" for i in range(len(concrete.outputs))]
    named = zip(paths, results, strict=True)
    return {path: describe(path, graph.value(tensor)) for path, tensor in named}


def _captures(traced: Any, keras: Mapping[int, Any], names: Mapping[str, str]) -> tuple[Capture, ...]:
    by_handle = {id(variable.handle): variable for variable in traced.variables}
    by_handle |= variables_of(external for external, _ in traced.captures if id(external) not in by_handle)
    taken: set[str] = set()
    captures = []
    for external, internal in traced.captures:
        variable = by_handle.get(id(external))
        if variable is None:
            captures.append(Capture(names[internal.op.name], external))
            continue
        public = keras.get(id(variable), variable)
        name = unique_among(getattr(public, "path", None) or path_of(variable), taken)
        captures.append(Capture(names[internal.op.name], external, public, name))
    return tuple(captures)


def _variable(capture: Capture) -> Variable:
    variable = capture.variable
    shape = variable.shape
    known = not hasattr(shape, "rank") or shape.rank is not None  # Keras shapes are tuples
    dtype = variable.dtype
    return Variable(
        name=capture.name or "",
        handle=capture.node,
        dtype=dtype if isinstance(dtype, str) else dtype.name,
        shape=tuple(shape) if known else None,
        trainable=bool(variable.trainable),
        captured=True,
        synchronization=declared(variable, "synchronization"),
        aggregation=declared(variable, "aggregation"),
    )


# Names of Keras variables: map each tf.Variable to its path in Keras.
#
# A traced function only has tf.Variables. The Keras objects are searched where the function itself finds them: in its
# closure, its bound object, its partial arguments and the globals that it names.


_DEPTH = 6
_BUDGET = 20_000
_SKIPPED = ("tensorflow", "tf_keras", "numpy", "builtins", "typing", "abc")


def keras_variables(*roots: Any) -> dict[int, Any]:
    """Return the Keras variables that are reachable from `roots`, by `id(tf.Variable)`."""
    found: dict[int, Any] = {}
    if "keras" not in sys.modules:
        return found
    seen: set[int] = set()
    frontier = list(roots)
    for _ in range(_DEPTH):
        following: list[Any] = []
        for item in frontier:
            if id(item) in seen or len(seen) > _BUDGET:
                continue
            seen.add(id(item))
            following += _inside(item, found)
        frontier = following
    return found


def _inside(item: Any, found: dict[int, Any]) -> Iterator[Any]:
    """Yield the objects inside an object; of a Keras object, record the variables instead."""
    if _is_keras(item):
        for variable in _variables_of(item):
            found.setdefault(id(getattr(variable, "value", None)), variable)
    elif isinstance(item, Mapping):
        yield from list(item.values())
    elif isinstance(item, list | tuple | set | frozenset):
        yield from item
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from _referenced(item)
    elif hasattr(item, "python_function"):
        yield item.python_function
    elif not isinstance(item, type | types.ModuleType) and not _is_skipped(item):
        yield from list(getattr(item, "__dict__", {}).values())


def _is_keras(item: Any) -> bool:
    return any(base.__module__.startswith("keras.") for base in type(item).__mro__)


def _is_skipped(item: Any) -> bool:
    """Return whether an object holds no Keras 3 variables; those of tf_keras are tf.Variables."""
    return any(base.__module__.partition(".")[0] in _SKIPPED for base in type(item).__mro__ if base is not object)


def _variables_of(item: Any) -> Iterator[Any]:
    if hasattr(item, "path") and hasattr(item, "value"):
        yield item
        return
    for owner in (item, getattr(item, "optimizer", None), *(getattr(item, "metrics", None) or ())):
        yield from getattr(owner, "variables", None) or ()


def _referenced(function: types.FunctionType) -> Iterator[Any]:
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from (function.__defaults__ or ())
    yield getattr(function, "__wrapped__", None)
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading an empty cell raises
    except ValueError:
        return False
    return True


# Find the tf.Variable of a handle that a function captures without the variable, as v1 optimizers do with slots.
#
#     tf.raw_ops.ResourceApplyAdagrad(var=w.handle, accum=slot.handle, ...)
#
# A function records the variables that it reads; of a variable that only raw ops use, it records just the handle. The
# variable is then found among the objects that refer to the handle.


def variables_of(handles: Iterable[Any]) -> dict[int, Any]:
    """Return the variables of handles, by `id(handle)`; handles of other resources are left out."""
    import tensorflow as tf

    wanted = {id(handle): handle for handle in handles if getattr(handle, "dtype", None) == tf.resource}
    if not wanted:
        return {}
    # An object may keep its attributes in a dictionary, which then refers to the handle instead of the object.
    holders = gc.get_referrers(*wanted.values())
    dictionaries = [one for one in holders if isinstance(one, dict)]
    holders += gc.get_referrers(*dictionaries) if dictionaries else []
    found: dict[int, Any] = {}
    for one in holders:
        if isinstance(one, tf.Variable) and id(handle := getattr(one, "handle", None)) in wanted:
            found.setdefault(id(handle), one)
    return found


# Flatten nested arguments and results to named tensors: `{"image": t}` given as `x` is "x/image".

# Names of the flat components of TensorFlow's composite tensors, by the class of their spec.
_COMPONENTS = {
    "SparseTensorSpec": ("indices", "values", "dense_shape"),
    "IndexedSlicesSpec": ("values", "indices", "dense_shape"),
}


class SpecLeaf(NamedTuple):
    """One tensor (or tensor spec) of a structure; `dense` unless it is a part of a composite tensor."""

    path: str
    tensor: Any
    dense: bool


def as_spec(argument: Any) -> Any:
    """Return an argument with its arrays, tensors and Keras inputs replaced by specs, at any depth."""
    import tensorflow as tf

    if isinstance(argument, tf.TypeSpec):
        return argument
    is_keras = any(base.__name__ == "KerasTensor" for base in type(argument).__mro__)
    if is_keras or isinstance(argument, tf.Tensor) or hasattr(argument, "__array_interface__"):
        return tf.TensorSpec(argument.shape, argument.dtype)
    if isinstance(argument, Mapping | list | tuple):
        return tf.nest.map_structure(as_spec, argument)
    return argument  # a Python value is part of the trace


def of_any_batch(argument: Any) -> Any:
    """Return specs for the data of a Keras model; those of arrays and tensors get an unknown batch size."""
    import tensorflow as tf

    if isinstance(argument, Mapping | list | tuple):
        return tf.nest.map_structure(of_any_batch, argument)
    is_data = isinstance(argument, tf.Tensor) or hasattr(argument, "__array_interface__")
    spec = as_spec(argument)
    if not is_data or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def leaves(structure: Any, path: str) -> Iterator[SpecLeaf]:
    """Yield the tensors of a structure in TensorFlow's flat order, without Python values."""
    import tensorflow as tf

    if isinstance(structure, tf.TensorSpec | tf.Tensor):
        yield SpecLeaf(path, structure, True)
    elif isinstance(structure, tf.TypeSpec) or hasattr(structure, "_type_spec"):
        yield from _components(structure, path)
    elif isinstance(structure, Mapping):
        for key in sorted(structure):
            yield from leaves(structure[key], _join(path, key))
    elif isinstance(structure, tuple) and hasattr(structure, "_fields"):
        for key, value in zip(structure._fields, structure, strict=True):
            yield from leaves(value, _join(path, key))
    elif isinstance(structure, list | tuple):
        for index, value in enumerate(structure):
            yield from leaves(value, _join(path, index))
    elif type(structure).__module__ != "builtins":
        for index, value in enumerate(tf.nest.flatten(structure, expand_composites=True)):
            if value is not structure:
                yield from leaves(value, _join(path, index))


def _components(composite: Any, path: str) -> Iterator[SpecLeaf]:
    """Yield the parts of a composite (a sparse or ragged tensor, an iterator, a variable...) or of its spec."""
    import tensorflow as tf

    parts = tf.nest.flatten(composite, expand_composites=True)
    if len(parts) == 1:
        yield SpecLeaf(path, parts[0], False)
        return
    spec = composite if isinstance(composite, tf.TypeSpec) else composite._type_spec
    names: tuple[str, ...] | None = _COMPONENTS.get(type(spec).__name__)
    if names is None and isinstance(spec, tf.RaggedTensorSpec):
        names = ("flat_values", *(f"row_splits_{i}" for i in range(len(parts) - 1)))
    for index, part in enumerate(parts):
        yield SpecLeaf(_join(path, names[index] if names is not None else index), part, False)


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def output_leaves(structure: Any) -> Iterator[SpecLeaf]:
    """Yield the results of a function, named by dict key, else `output_0`, `output_1`... as in a SavedModel."""
    if isinstance(structure, Mapping) or hasattr(structure, "_fields"):
        yield from leaves(structure, "")
    elif isinstance(structure, list | tuple):
        for index, value in enumerate(structure):
            yield from leaves(value, f"output_{index}")
    else:
        yield from leaves(structure, "output_0")
