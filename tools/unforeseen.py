"""Errors that nobody foresaw: where TensorFlow does not take the graph either, the graph is to blame.

KeyError in a pass ──► tf.import_graph_def(graph) fails ──► GraphError: TensorFlow cannot load this graph
"""

from __future__ import annotations

import argparse

from autograph_rewrite.errors import GraphError, RewriteError


def of_the_graph(error: Exception, args: argparse.Namespace) -> Exception:
    """Return an error; instead of one that nobody foresaw, what TensorFlow says against the graph, if it does.

    Args:
        error: what a verb has raised.
        args: of the verb.
    """
    if (
        isinstance(error, (RewriteError, OSError, ModuleNotFoundError))
        or not {"graph", "train_op"} <= vars(args).keys()
    ):
        return error
    from autograph_rewrite.requires import tensorflow
    from autograph_rewrite.tools.common_arguments import load_graph

    try:
        graph_def = load_graph(args).graph_def
    except RewriteError:
        return error
    tf = tensorflow()
    try:
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
    except Exception as refusal:  # it raises several types, all for the same reason
        said = next(iter(str(refusal).splitlines()), "")
        refused = GraphError(f"TensorFlow cannot load this graph: {said}", where=str(args.graph))
        refused.__cause__ = error
        return refused
    return error
