"""Loads proto messages from shipped descriptor sets, each in a private pool: TensorFlow's and the package's.

Code that protoc generates works with one range of protobuf versions only; a descriptor set works with all.
Importing `tensorflow.core.framework.graph_pb2` imports all of TensorFlow (seconds); this takes milliseconds.
The wire format is the same, so these classes and TensorFlow's classes read each other's bytes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

Message = message.Message
_TENSORFLOW = Path(__file__).with_name("tensorflow_protos.binpb")


@cache
def message_class(path: Path, name: str) -> Any:  # a message class made at run time has no static type
    """Return the class of a message that a descriptor set declares, by its full name."""
    return message_factory.GetMessageClass(_pool(path).FindMessageTypeByName(name))


@cache
def _pool(path: Path) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file:
        pool.Add(file)
    return pool


def proto(name: str) -> Any:
    """Return the class of `tensorflow.<name>`, for example `proto("GraphDef")`."""
    return message_class(_TENSORFLOW, f"tensorflow.{name}")
