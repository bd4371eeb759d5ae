"""Fetch a user's variable that lives on a server when Python asks for it.

    step      updates w on the server                          the user's tf.Variable holds an older value
    w.numpy() asks for w's handle ──► fetched, written ──► read       so do evaluation, checkpoints, other functions
    step      w.assign(...) has asked for the handle, too ──► compared, and sent if it is another value

All code that reads or writes a `tf.Variable` takes its handle from the object. The object gets a subclass whose handle
property first fetches the value. Code that has taken the handle before, such as a traced function, would read an older
value. So while other code holds the handle, as its reference count shows, the variable is fetched after every step.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from autograph_rewrite import tf_private
from autograph_rewrite.load.variables import Capture, FunctionBinding
from autograph_rewrite.passes.parameter_server.await_writes import FLAG, PREFIX
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine.session import DistributedSession

_SERVED = "_autograph_served"
_HANDLE = "_handle"
_INPUTS, _CAPTURES = "_captured_inputs", "_function_captures"
"""Attributes with the captures: of a ConcreteFunction, whose entries may be functions to call, and of its graph."""
_OPEN = "_scope_exit_callbacks"
"""An attribute of a FuncGraph that is None unless the graph is being built."""
_REFERENCES = 2
"""References to a handle that no other code holds: that of the variable, and that of the call that counts."""
_SHARE = 20
"""The least time between two searches of all objects, in units of the time that a search takes."""


class ValueSource(Protocol):
    """Holds the values of variables that are elsewhere."""

    def bring(self, wanted: Sequence[Served]) -> None:
        """Write the values of these variables into them, and possibly those of others."""


class Served:
    """One variable of the user, whose value may be elsewhere.

    Args:
        variable: the tf.Variable; its class is replaced by a subclass.

    Attributes:
        source: holds its value; None: the tf.Variable does.
        is_empty: whether its memory has been freed, as its value is elsewhere.
    """

    def __init__(self, variable: Any, held: Held) -> None:
        self.source: ValueSource | None = None
        self.is_empty = False
        self.attributes, self.held = vars(variable), held
        self.attributes[_SERVED] = self
        kind: Any = type(variable)
        variable.__class__ = _subclass(kind)

    @property
    def handle(self) -> Any:
        """The handle of the variable, which may hold an older value."""
        return self.attributes[_HANDLE]

    def here(self) -> None:
        """Fetch the value, if it is elsewhere."""
        if self.source is not None:
            self.source.bring([self])


class Held:
    """Counts the references to variables' handles from distributed functions, and from graphs that cannot be run."""

    def __init__(self) -> None:
        self._roots: list[Any] = []
        self._counted: Counter[int] | None = None
        self._dead: list[weakref.ref[Any]] = []
        self._looked, self._took = 0.0, 0.0
        self._found: dict[int, int] = {}
        self._bindings: list[FunctionBinding] = []
        self._served: dict[int, Served] = {}

    def add(self, *roots: Any) -> None:
        """Count the references from these objects, too, directly or in lists, tuples, sets and dictionaries."""
        self._roots += roots
        self._counted = None

    def add_binding(self, binding: FunctionBinding) -> None:
        """Count the references from a traced function; let it fetch variables first when the program calls it."""
        self._bindings.append(binding)
        self.add(*binding.captures)
        for concrete in _traces(binding):
            graph = getattr(concrete, "graph", None)
            for holder, name in ((concrete, _INPUTS), (graph, _CAPTURES)):
                if (found := getattr(holder, name, None)) is not None:
                    self.add(found)
        self._ask_first([binding])

    @property
    def has_served(self) -> bool:
        """Whether there are variables that live on servers."""
        return bool(self._served)

    def add_served(self, variables: Iterable[Served]) -> None:
        """Let all traced functions fetch these variables before they run."""
        self._served |= {id(one.handle): one for one in variables}
        self._ask_first(self._bindings)

    def _ask_first(self, bindings: Iterable[FunctionBinding]) -> None:
        for concrete in (one for binding in bindings for one in _traces(binding)):
            captured: Any = getattr(concrete, _INPUTS, None)
            for index, value in enumerate(captured if isinstance(captured, list) else ()):
                if (one := self._served.get(id(value))) is not None:
                    captured[index] = functools.partial(_current, one)
                    self._counted = None

    def others(self, variables: Mapping[str, Served]) -> set[str]:
        """Return the variables whose handles other code holds, and may read without fetching."""
        found = self._others(variables)
        seen = {id(variables[name].handle): sys.getrefcount(variables[name].handle) for name in found}
        if found and seen != self._found and time.monotonic() - self._looked > _SHARE * self._took:
            self._look()
            found = self._others(variables)
        self._found = seen
        return found

    def _others(self, variables: Mapping[str, Served]) -> set[str]:
        graphs = [graph for one in self._dead if (graph := one()) is not None]
        if len(graphs) < len(self._dead):
            self._counted = None
        if self._counted is None:
            self._counted = references([*self._roots, *(getattr(graph, _CAPTURES) for graph in graphs)])
        own = self._counted
        return {
            name
            for name, one in variables.items()
            if sys.getrefcount(one.attributes[_HANDLE]) != own[id(one.attributes[_HANDLE])] + _REFERENCES
        }

    def _look(self) -> None:
        """Find the complete graphs without a function, whose references do not count: TensorFlow keeps some of them.

        It traces a function twice if it makes variables, and makes separate graphs for these.
        """
        began = time.monotonic()
        graph_type, function_type = tf_private.graphs_and_functions()
        graphs, run = [], set()
        for one in gc.get_objects():
            kind = type(one)  # `isinstance` reads `__class__`, which raises for some: numpy's files, dead proxies
            if issubclass(kind, graph_type):
                graphs.append(one)
            elif issubclass(kind, function_type):
                run.add(id(getattr(one, "graph", None)))
        dead = [g for g in graphs if id(g) not in run and hasattr(g, _CAPTURES) and getattr(g, _OPEN, 0) is None]
        self._dead = [weakref.ref(graph) for graph in dead]
        self._counted = None
        self._looked = time.monotonic()
        self._took = self._looked - began


def references(roots: Iterable[Any]) -> Counter[int]:
    """Return the number of references to each tensor from roots and the containers in them, by id."""
    kind = tensorflow().__internal__.EagerTensor
    found: Counter[int] = Counter()
    pending = list({id(root): root for root in roots}.values())
    seen = set(map(id, pending))
    while pending:
        for one in gc.get_referents(pending.pop()):
            if issubclass(type(one), kind):
                found[id(one)] += 1
            elif issubclass(type(one), (list, tuple, dict, set)) and id(one) not in seen:
                seen.add(id(one))
                pending.append(one)
    return found


def served(capture: Capture, held: Held) -> Served | None:
    """Return a captured variable that is fetched when it is read; None where reads of it cannot be noticed."""
    variable = capture.variable
    variable = getattr(variable, "_value", variable)  # a Keras variable wraps a tf.Variable
    if getattr(variable, "__dict__", {}).get(_HANDLE) is not capture.value:
        return None
    known: Served | None = vars(variable).get(_SERVED)
    if known is not None:
        return known if known.held is held else None  # another distributed function fetches it
    return Served(variable, held) if type(variable) in tf_private.resource_variables() else None


def bring(wanted: Iterable[Served]) -> None:
    """Fetch the values of variables that are elsewhere."""
    by_source: dict[int, list[Served]] = {}
    for one in wanted:
        if one.source is not None:
            by_source.setdefault(id(one.source), []).append(one)
    for several in by_source.values():
        if (source := several[0].source) is not None:
            source.bring(several)


def _traces(binding: FunctionBinding) -> list[Any]:
    return [one for one in (binding.concrete, binding.first) if one is not None]


def _current(one: Served) -> Any:
    one.here()
    return one.handle


@functools.cache
def _subclass(base: Any) -> type:
    """Return the subclass of variables that are fetched when code asks for their handle."""

    class ResourceVariable(base):  # type: ignore[misc]
        """A tf.Variable that lives on a server."""

        @property
        def _handle(self) -> Any:
            attributes = vars(self)
            attributes[_SERVED].here()
            return attributes[_HANDLE]

        @_handle.setter
        def _handle(self, handle: Any) -> None:
            self.__dict__[_HANDLE] = handle

    return ResourceVariable


# Tables written between two steps: feeds that let a step look up rows only once worker 0 has written them.


def table_flags(session: DistributedSession) -> dict[str, Any]:
    """Return the tensors to feed with whether a table was written, by its handle, of tables looked up on servers."""
    before, behind = f"{PREFIX}/", f"/{FLAG}"
    return {
        op.name[len(before) : -len(behind)]: op.outputs[0]
        for op in session.graph.get_operations()
        if op.name.startswith(before) and op.name.endswith(behind)
    }
