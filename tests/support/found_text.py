"""What passes find besides the graph, in lines: parts, shards, homes, edges, notes, and how instances are run.

edge %dw: partial(sum) -> replicated by add_n for w, 12 bytes
wait %x/block: - | %autograph_micro/gate/passed of micro-batch 0
"""

from __future__ import annotations

from collections.abc import Iterator

from autograph_rewrite.ir.format.literals import shape_text
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import EACH, MODEL, STAGE
from autograph_rewrite.ir.types.device_names import short
from autograph_rewrite.passes.base.instance_order import HappensAfter
from autograph_rewrite.passes.base.report import Resolved
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout
from autograph_rewrite.passes.micro_batches.sequential_averages import Averages
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.resolve.remat.activations import Decision
from autograph_rewrite.resolve.stages.assignment import Stages
from autograph_rewrite.training_graph import Variable


def found(rewrite: Rewrite) -> Iterator[str]:
    """Yield a line for everything that a rewrite knows by now."""
    item, plan = rewrite.item, rewrite.plan
    for info in item.inputs.values():
        yield f"input {info.name} = %{info.tensor.removesuffix(':0')}"
    for variable in item.variables.values():
        yield f"variable {_variable(variable)}"
    for variable in item.state.values():
        yield f"state {_variable(variable)}"
    for name, home in plan.homes.items():
        yield f"home of {name} @{short(home)}"
    for edge in plan.edges:
        yield _edge(edge)
    if rewrite.has(Resolved):
        resolved = rewrite.get(Resolved)
        yield from (f"note {note.op} '{note.node}': {note.text}" for note in resolved.notes)
        yield from (f"inexact {note.op} '{note.node}': {note.text}" for note in resolved.inexact)
        yield from (f"whole input {info.name}" for info in resolved.shared)
    if rewrite.has(Decision):
        yield from (f"kept %{left.node}: {left.reason}" for left in rewrite.get(Decision).left)
    if rewrite.has(Stages) and not rewrite.has(Blocks):  # later passes add nodes of their own
        yield from (f"assigned to stage {n.place[STAGE]}: %{n.name}" for n in rewrite.graph if STAGE in n.place)
    if rewrite.has(Blocks):
        yield f"blocks are measured on %{rewrite.get(Blocks).source.name}"
    if rewrite.has(Averages):
        yield from (f"average of %{node.name}: %{value.name}" for node, value in rewrite.get(Averages).values.items())
    if rewrite.has(ReplicaLayout):
        yield from _instances(rewrite.graph, rewrite.get(ReplicaLayout))


def _variable(variable: Variable) -> str:
    return f"{variable.name}: {variable.dtype}{shape_text(variable.shape)}"


def _edge(edge: EdgePlan) -> str:
    bucket = f", bucket {edge.bucket}" if edge.bucket else ""
    role = f", {edge.role}" if edge.role else ""
    compressed = f", {edge.compressor}" if edge.compressor != "none" else ""
    owner = edge.owner or "the step"
    return (
        f"edge %{edge.value}: {edge.from_} -> {edge.to} by {edge.lowering} for {owner}, {edge.bytes} bytes"
        f"{bucket}{role}{compressed}: {edge.reason}"
    )


def _instances(graph: Graph, run: ReplicaLayout) -> Iterator[str]:
    for stage, devices in enumerate(run.cells):
        of = f" of stage {stage}" if len(run.cells) > 1 else ""
        yield f"instances{of} @{' @'.join(map(short, devices))}"
    for node in graph:
        if MODEL in node.place or (STAGE in node.place and node.span == EACH):
            yield f"stage {run.cell(node)}: %{node.name}"
    for node, waits in run.order.roots.items():
        yield f"wait %{node.name}: {' | '.join(map(_wait, waits))}"
    for node, sums in run.order.sums.items():
        if sums:
            yield f"wait %{node.name}: grown {' '.join(f'%{total.name}' for total in sums)}"
    for node in run.order.meetings:
        yield f"meeting at %{node.name}"


def _wait(wait: HappensAfter | None) -> str:
    return f"%{wait.node.name} of micro-batch {wait.micro}" if wait is not None else "-"
