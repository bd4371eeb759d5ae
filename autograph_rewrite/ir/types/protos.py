"""TensorFlow's proto messages without TensorFlow: classes from a shipped descriptor set in a private pool.

Importing `tensorflow.core.framework.graph_pb2` pulls in all of TensorFlow (seconds); this takes milliseconds.
The wire format is the same, so bytes cross freely between these classes and TensorFlow's own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

Message = message.Message


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    shipped = Path(__file__).with_name("tensorflow_protos.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(shipped).file:
        pool.Add(file)
    return pool


@cache
def proto(name: str) -> Any:  # a message class made at run time has no static type
    """Return the class of `tensorflow.<name>`, for example `proto("GraphDef")`."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"tensorflow.{name}"))
