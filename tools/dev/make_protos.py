"""Regenerate the shipped descriptor sets, and the op registry from the installed TensorFlow.

Run as `python -m autograph_rewrite.tools.dev.make_protos` after a TensorFlow upgrade. With both, verbs that only read
protos need not import TensorFlow, which takes seconds.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

import autograph_rewrite
from autograph_rewrite import tf_private


def _closure(files: list[FileDescriptor]) -> list[FileDescriptor]:
    """Return `files` and all files that they import, dependencies first."""
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

    everything = op_def_pb2.OpList.FromString(tf_private.registered_ops())
    kept = op_def_pb2.OpList()
    for op in sorted(everything.op, key=lambda op: op.name):
        op.summary = op.description = ""
        for arg in (*op.input_arg, *op.output_arg, *op.attr):
            arg.description = ""
        kept.op.append(op)
    data: bytes = kept.SerializeToString(deterministic=True)
    return data


def plan_descriptor(root: Path) -> bytes:
    """Compile plan.proto (this needs grpcio-tools)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.binpb"
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={out}"]
        subprocess.run([*command, "autograph_rewrite/plan/plan.proto"], cwd=root, check=True)
        return out.read_bytes()


def main() -> None:
    """Write all files to their places in the package."""
    package = Path(autograph_rewrite.__file__).parent
    (package / "plan" / "plan.binpb").write_bytes(plan_descriptor(package.parent))
    types = package / "ir" / "types"
    (types / "tensorflow_protos.binpb").write_bytes(descriptor_set())
    (types / "tensorflow_ops.binpb.gz").write_bytes(gzip.compress(op_registry(), 9, mtime=0))


if __name__ == "__main__":
    main()
