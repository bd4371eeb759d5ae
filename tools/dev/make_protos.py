"""Regenerate the shipped descriptor set and op registry from the installed TensorFlow.

Run as `python -m autograph_rewrite.tools.dev.make_protos` after a TensorFlow upgrade. Shipping both lets every verb
that only reads protos work without importing TensorFlow, which takes seconds.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor


def _closure(files: list[FileDescriptor]) -> list[FileDescriptor]:
    """Return `files` and everything that they import, dependencies first."""
    ordered: dict[str, FileDescriptor] = {}

    def visit(file: FileDescriptor) -> None:
        if file.name in ordered:
            return
        for dependency in file.dependencies:
            visit(dependency)
        ordered[file.name] = file

    for file in files:
        visit(file)
    return list(ordered.values())


def descriptor_set() -> bytes:
    """Serialise the descriptors of GraphDef, MetaGraphDef, SavedModel and OpList."""
    from tensorflow.core.framework import graph_pb2, op_def_pb2
    from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, saved_model_pb2

    roots = [m.DESCRIPTOR for m in (graph_pb2, op_def_pb2, meta_graph_pb2, saved_model_pb2, config_pb2)]
    files = descriptor_pb2.FileDescriptorSet()
    for file in _closure(roots):
        file.CopyToProto(files.file.add())
    return files.SerializeToString(deterministic=True)


def op_registry() -> bytes:
    """Serialise every registered OpDef without its prose."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    everything = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    kept = op_def_pb2.OpList()
    for op in sorted(everything.op, key=lambda op: op.name):
        op.summary = op.description = ""
        for arg in (*op.input_arg, *op.output_arg, *op.attr):
            arg.description = ""
        kept.op.append(op)
    data: bytes = kept.SerializeToString(deterministic=True)
    return data


def main() -> None:
    """Write both files beside `ir/types/protos.py`."""
    folder = Path(__file__).resolve().parent.parent.parent
    package = folder / "ir" if (folder / "ir").is_dir() else folder / "autograph_rewrite" / "ir"
    package /= "types"
    (package / "tensorflow_protos.binpb").write_bytes(descriptor_set())
    (package / "tensorflow_ops.binpb.gz").write_bytes(gzip.compress(op_registry(), 9, mtime=0))


if __name__ == "__main__":
    main()
