"""Give access to TensorFlow's private names; no other module of this package imports any.

They are the same from TensorFlow 2.16 to 2.21. Where callers have a public alternative, a function returns None, or
something empty, if a private name is not as expected.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from autograph_rewrite.requires import tensorflow

_REGISTRY = "tensorflow.python.framework.op_def_registry"


def context() -> Any:
    """Return the eager context; only it can start the server for collectives."""
    tensorflow()
    from tensorflow.python.eager import context

    return context.context()


def has_started() -> bool:
    """Return whether TensorFlow's runtime has started, so that devices and servers are fixed."""
    return context()._context_handle is not None


def collective_server() -> Any:
    """Return the ServerDef of the running server for collectives, None if none runs."""
    return getattr(context(), "_collective_ops_server_def", None)


def global_seed() -> int | None:
    """Return the random seed that the program has set."""
    from tensorflow.python.eager import context

    seed = context.global_seed()
    return None if seed is None else int(seed)


def cancellation_manager() -> Any:
    """Return a new cancellation manager, None if this TensorFlow has no such class."""
    try:
        from tensorflow.python.eager import cancellation

        return cancellation.CancellationManager()
    except (ImportError, AttributeError):
        return None


def executor() -> tuple[Any, Any] | None:
    """Return the modules `context` and `execute`, which run functions by name; None if they are not as expected."""
    try:
        from tensorflow.python.eager import context, execute
    except ImportError:
        return None
    wanted = ("add_function_def", "has_function", "remove_function", "function_call_options")
    functions = ("execute", "execute_with_cancellation")
    known = all(hasattr(context.Context, name) for name in wanted) and all(hasattr(execute, n) for n in functions)
    return (context, execute) if known else None


@functools.cache
def resource_variables() -> tuple[type, ...]:
    """Return the classes of the objects that `tf.Variable` makes, outside of a function and in one."""
    try:
        from tensorflow.python.eager.polymorphic_function.polymorphic_function import UnliftedInitializerVariable
        from tensorflow.python.ops.resource_variable_ops import ResourceVariable
    except ImportError:
        return ()
    return ResourceVariable, UnliftedInitializerVariable


@functools.cache
def graphs_and_functions() -> tuple[type | tuple[()], type | tuple[()]]:
    """Return FuncGraph and ConcreteFunction; empty tuples if they are not as expected."""
    try:
        from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
        from tensorflow.python.framework.func_graph import FuncGraph
    except ImportError:
        return (), ()
    return FuncGraph, ConcreteFunction


def is_imported() -> bool:
    """Return whether this process has imported TensorFlow's registry of ops."""
    return _REGISTRY in sys.modules


def registered_op(name: str) -> Any:
    """Return the OpDef of an op, if TensorFlow is already imported and knows the op."""
    registry = sys.modules.get(_REGISTRY)
    return registry.get(name) if registry is not None else None


def registered_kernels() -> Any:
    """Return the KernelList of all kernels."""
    from tensorflow.python.framework import kernels

    return kernels.get_all_registered_kernels()


def registered_ops() -> bytes:
    """Return the encoded OpList of all ops."""
    from tensorflow.python.client import pywrap_tf_session

    encoded: bytes = pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList())
    return encoded
