"""Add the folded nodes of one conversion under one name prefix (FoldedBuilder).

The members of an exchange are the replicas, or the processes if each process first sums the values of its replicas. In
the second case the value runs once, and so do the nodes before the exchange. A builder's span is that of a member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import Select, Span
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.passes.base.rewriting import Rewrite, Site


@dataclass(frozen=True)
class FoldedBuilder:
    """Adds nodes for one value.

    Attributes:
        near: the value that they work on; constants are added in its loop.
        name: prefix of their names.
        span: how often they run.
        origin: the node that they are added for.
    """

    rewrite: Rewrite
    near: Value
    name: str
    span: Span
    origin: Node

    @classmethod
    def of(
        cls, rewrite: Rewrite, near: Value, name: str = "", *, span: Span | None = None, origin: Node | None = None
    ) -> FoldedBuilder:
        """Return a builder for a value.

        Args:
            near: the value that is converted.
            name: prefix of the nodes' names; "": the name of the node that produces the value.
            span: how often nodes run; None: as often as that node.
            origin: the original node that they are added for; None: that node.
        """
        node = near.node
        return cls(rewrite, near, name or node.name, node.span if span is None else span, origin or node)

    def op(
        self,
        op: str,
        *inputs: Value,
        what: str,
        gather: Collection[int] = (),
        controls: Iterable[Node] = (),
        **attrs: Any,
    ) -> Value:
        """Add a node; return its first output.

        Args:
            op: op type.
            inputs: if the node runs less often than an input, it reads the first instance of that input.
            what: its name, after the builder's.
            gather: input positions that read all replicas' instances instead of the first.
            controls: nodes to wait for.
            attrs: those that do not follow from the inputs.
        """
        site = Site(f"{self.name}/{what}", self.span, self.origin)
        return self.rewrite.add(op, inputs, site, gather=gather, controls=controls, attrs=attrs).output()

    def common(self, op: str, *inputs: Value, what: str, **attrs: Any) -> Value:
        """Add a node that runs as often as nodes with replicated values; return its first output.

        Args:
            op: op type.
            what: its name, after the builder's.
            **attrs: by name, decoded.
        """
        return replace(self, span=self.rewrite.common_span).op(op, *inputs, what=what, **attrs)

    def gather(self, op: str, value: Value, *others: Value, what: str, **attrs: Any) -> Value:
        """Add a node that runs once for all replicas and reads all instances of `value`; return its first output.

        Args:
            op: op type, such as AddN or ConcatV2.
            value: its instances are the op's list of operands.
            *others: operands after the list.
            what: its name, after the builder's.
            **attrs: by name, decoded.
        """
        span = self.rewrite.of_all
        count = self.rewrite.mesh.taken(span, value.node.span)
        return replace(self, span=span).op(op, value, *others, what=what, gather=(0,), N=count, **attrs)

    def from_all(self, op: str, value: Value, *others: Value, what: str, select: Select, **attrs: Any) -> Value:
        """Add a node on every device that reads what all devices hold; return its first output.

        Args:
            op: op type, such as AddN or ConcatV2.
            value: its instances are the op's list of operands.
            *others: operands after the list.
            what: its name, after the builder's.
            select: which instances and outputs it reads.
            **attrs: by name, decoded.
        """
        site = Site(f"{self.name}/{what}", self.span, self.origin)
        return self.rewrite.add(op, [value, *others], site, selects={0: select}, attrs=attrs).output()

    def const(self, content: Any, dtype: int, what: str) -> Value:
        """Add a constant.

        Args:
            content: a number, or nested lists of them.
            dtype: number of TensorFlow's type.
            what: its name, after the builder's.
        """
        if dtype == dtypes.BFLOAT16:  # numpy does not know it
            return self.op("Cast", self.const(content, dtypes.FLOAT, f"{what}/wide"), what=what, DstT=dtype)
        return self.rewrite.const(content, dtypes.numpy_dtype(dtype), name=f"{self.name}/{what}", near=self.near)

    def of_replicas(self, contents: Sequence[Any], dtype: Any, what: str) -> Value:
        """Add a constant that differs between replicas.

        Args:
            contents: one for every replica of the job.
            dtype: a numpy type.
            what: its name, after the builder's.
        """
        rewrite = self.rewrite
        mine = [encode("tensor", np.asarray(one, dtype)) for one in rewrite.of_own_replicas(contents)]
        raws = rewrite.by_replica(mine, self.span)
        made = Builder(rewrite.graph, f"{self.name}/{what}", self.origin, self.span)
        return made.op("Const", value=raws, dtype=dtypes.from_numpy(np.dtype(dtype)))

    def numbers(self, content: Any, what: str) -> Value:
        """Add a constant of int32: axes, sizes, positions."""
        return self.const(content, dtypes.INT32, what)
