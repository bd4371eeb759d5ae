"""What crosses between stages in different processes is asked for before anybody computes, and sent once it is made.

    before   stage 0: F0 F1 ...                   stage 1 asks for what F0 makes; nobody answers while stage 0 computes
    after    stage 1: ready ─^─► stage 0: F0 ...  stage 1 has asked by then, and F0 answers as soon as it ends

    before   dx ─► Identity (waits for dw, too) ─► stage 0
    after    dx ─► Identity ─► stage 0

A process asks another for a tensor by a message, for every tensor that it will read, as soon as the step begins. Who is
computing already, with as many threads as it has cores, comes to read its messages only when it has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autograph_rewrite.ir.graph import Graph, Node, Span
from autograph_rewrite.passes.order_micro import Order, Wait
from autograph_rewrite.passes.stages import Stages
from autograph_rewrite.plan.devices import process_of

READY = "autograph_stages/ready"


def send_early(graph: Graph, stages: Stages) -> int:
    """Let values that another stage reads wait for nothing that they are not made of; return how many waits are gone.

    TensorFlow's gradients of an op come out together, each behind an Identity that waits for all of them.

    Args:
        graph: the folded graph.
        stages: of its EACH nodes.
    """
    gone = 0
    for node in graph:
        if node.op != "Identity" or node.span is not Span.EACH or node not in stages.of:
            continue
        readers = [use.node for use in node.output().uses]
        if not any(stages.of.get(reader, stages.of[node]) != stages.of[node] for reader in readers):
            continue
        for control in [one for one in node.controls if one.op == "NoOp" and one.span is Span.EACH]:
            node.remove_control(control)
            gone += 1
    return gone


def send_first(graph: Graph, stages: Stages, order: Order, devices: Sequence[Sequence[str]]) -> Order:
    passes = {}
    for gate in order.sums:
        inside = [*gate.controls, *(value.node for total in order.sums[gate] for value in total.inputs)]
        passed = gate.output().uses[0].node
        passes[any(node in stages.backward for node in inside), stages.of[gate]] = passed
    handed = {}
    for node in list(graph):
        if node.span is not Span.EACH or node not in stages.of:
            continue
        stage = stages.of[node]
        passed = passes.get((node in stages.backward, stage))
        for value in list(node.read_outputs):
            away = [use for use in value.uses if use.node.span is Span.EACH and _apart(stage, stages.of.get(use.node, stage), devices)]
            if not away or passed is None:
                continue
            copy = graph.add("Identity", [value], name=f"{node.name}/sent", span=Span.EACH, origin=node, controls=[passed], attrs={"T": value.dtype})
            stages.of[copy] = stage
            if node in stages.backward:
                stages.backward.add(copy)
            for use in away:
                use.node.set_input(use.index, copy.output())
            if passed not in handed:
                import numpy as np
                from autograph_rewrite.ir import dtypes
                default = graph.add("Const", name=f"{READY}/default", attrs={"value": np.zeros(8192, np.float32), "dtype": dtypes.FLOAT}, span=Span.ONCE)
                big = graph.add("PlaceholderWithDefault", [default.output()], name=f"{READY}/big", attrs={"dtype": dtypes.FLOAT, "shape": (8192,)}, span=Span.ONCE)
                handed[passed] = graph.add("CheckNumerics", [big.output()], name=f"{READY}/handed", attrs={"message": "x"}, span=Span.EACH, controls=[passed])
                stages.of[handed[passed]] = stage
    def later(wait):
        return wait and Wait(handed.get(wait.node, wait.node), wait.micro)
    roots = {node: tuple(map(later, waits)) for node, waits in order.roots.items()}
    return replace(order, roots=roots)


def _apart(one, other, devices):
    return any(process_of(own[one % len(own)]) != process_of(own[other % len(own)]) for own in devices)


def tell_ready(
    graph: Graph, stages: Stages, roots: Mapping[Node, tuple[Wait | None, ...]], devices: Sequence[Sequence[str]]
) -> int:
    """Let the forward part of a stage begin once the next stage's process has; return how many wait.

    Args:
        graph: the folded graph, placed.
        stages: of its EACH nodes.
        roots: what the parts of stages begin with.
        devices: of each replica's stages, in turn.
    """
    begins: dict[int, list[Node]] = {}
    for node in roots:
        if node not in stages.backward:
            begins.setdefault(stages.of.get(node, 0), []).append(node)
    made = 0
    for stage, nodes in sorted(begins.items()):
        pairs = dict.fromkeys((own[stage % len(own)], own[(stage + 1) % len(own)]) for own in devices)
        apart = [(here, there) for here, there in pairs if process_of(here) != process_of(there)]
        if stage + 1 >= stages.count or not apart:
            continue
        asked = [graph.add("NoOp", name=f"{READY}_{stage + 1}") for _ in apart]
        for node, (_, there) in zip(asked, apart, strict=True):
            node.set_device(there)
        ready = graph.add("NoOp", name=f"{READY}/stage_{stage}", controls=asked)
        ready.set_device(apart[0][0])
        for node in nodes:
            node.add_control(ready)
        made += 1
    return made
