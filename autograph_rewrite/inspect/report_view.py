"""Read the report and plan of a rewrite for all inspection modules; no other module knows their format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.table import without_ranking
from autograph_rewrite.ir.variable_ops import handle_uses, is_update
from autograph_rewrite.passes.base.report import Report
from autograph_rewrite.plan.codecs import shown
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan
from autograph_rewrite.plan.parts.names import exchanged_bytes
from autograph_rewrite.plan.parts.notes import row_of
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import devices_by_replica
from autograph_rewrite.resolve.coverage import NOTE, Coverage
from autograph_rewrite.training_graph import TrainingGraph

__all__ = ["STEP", "Account", "ShownEdge", "account_of", "edges_of", "model_edges_of", "plan_of"]


@dataclass(frozen=True)
class ShownEdge(EdgePlan):
    """A conversion of a value.

    Attributes:
        where: its place in the plan.
        along_model: it is between the devices of a replica, along the model axis `axis`.
    """

    where: str = ""
    along_model: bool = False

    @property
    def means(self) -> str:
        """The lowering, with the compressor if there is one."""
        return self.lowering if self.compressor == "none" else f"{self.lowering} of {shown(self.compressor)}"

    @property
    def kind(self) -> str:
        """`reduction` or `gather`, or `local` if replicas exchange nothing."""
        lowered = self.lowered
        if lowered.does(Operation.REDUCE) or lowered.does(Operation.SCATTER) or self.compressor != "none":
            return "reduction"
        return "gather" if lowered.does(Operation.GATHER) else "local"

    @property
    def joins_shards(self) -> bool:
        """Whether it gathers the whole of a variable that is split over the replicas."""
        return self.kind == "gather" and self.value.rpartition("/")[2] in ("whole", "again")


@dataclass(frozen=True)
class Account:
    """The report of a rewrite, and the figures of its plan.

    Attributes:
        report: of the rewrite.
        covered: how much of the step is divided, for the batch in question.
        edges: reshards.
        model_edges: the conversions between the devices of a replica.
        devices: devices[replica][logical], those of stages and of the model axis.
        plan_notes: notes of the plan: its builder's choices, settings without effect.
        ranking: the notes of the plan that are rows of the ranking of a search.
        exchanged_bytes: bytes that one member hands over in a step, summed over all exchanges of the plan.
        whole_bytes: of variables and optimizer state on one device.
        blocks: how the model axes cut trained variables, by name.
        layers: of a model in stages, those of each device of the first replica, by their trained variables.
    """

    report: Report
    covered: Coverage
    edges: tuple[ShownEdge, ...]
    model_edges: tuple[ShownEdge, ...]
    devices: tuple[tuple[str, ...], ...]
    plan_notes: tuple[str, ...]
    ranking: tuple[str, ...]
    exchanged_bytes: int
    whole_bytes: int = 0
    blocks: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """The plan of the rewrite."""
        return self.report.plan

    @property
    def batch(self) -> int:
        """The examples of all replicas together for which the bytes of the edges are counted; 0: not known."""
        return self.plan.batch


def account_of(item: TrainingGraph, batch: int | None = None) -> Account:
    """Return the account of a rewritten item, with the coverage for a batch of `batch` examples.

    Raises:
        GraphError: the item has no report.
    """
    report = item.report
    if report is None:
        raise GraphError(
            "this item has no report: it is an original, or only its graph was kept",
            hint="pass what ar.rewrite returned, or the file that its save() wrote",
        )
    plan = report.plan
    return Account(
        report,
        report.covered.at(batch),
        edges=edges_of(item),
        model_edges=model_edges_of(plan),
        devices=devices_by_replica(plan),
        plan_notes=tuple(note for note in without_ranking(plan.notes) if not note.startswith(NOTE)),
        ranking=tuple(note for note in plan.notes if row_of(note) is not None),
        exchanged_bytes=exchanged_bytes(plan.edges),
        whole_bytes=sum(variable.nbytes for variable in item.variables.values()),
        blocks=_blocks(item, plan) if plan.model is not None else {},
        layers=_layers(item, plan) if plan.pipeline is not None else {},
    )


def _blocks(item: TrainingGraph, plan: Plan) -> dict[str, str]:
    """Return how the model axes cut variables, by name: `dimension 1 in 2`."""
    first, found = {*devices_by_replica(plan)[0]}, {}
    for name, variable in item.variables.items():
        shards, cuts = variable.shards, []
        if shards is None or not variable.trainable:
            continue
        are_over_replicas = not first.issuperset(shards.devices[: shards.count])
        while shards is not None:
            cuts.append(f"dimension {shards.axis} in {len(shards.sizes)}")
            shards = shards.within[0] if shards.within else None
        if are_over_replicas:  # the innermost cut is that of the replicas
            cuts.pop()
        if cuts:
            found[name] = ", ".join(cuts)
    return found


def _layers(item: TrainingGraph, plan: Plan) -> dict[str, list[str]]:
    """Return the layers whose trained variables are read on each device of the first replica."""
    found: dict[str, dict[str, None]] = {device: {} for device in devices_by_replica(plan)[0]}
    for name, variable in item.variables.items():
        handle = item.graph.nodes.get(variable.handle)
        if not variable.trainable or handle is None:
            continue
        reads = [use.node for use in handle_uses(handle) if not is_update(use.node)]
        readers = [use.node.device for read in reads for use in read.output().uses]  # a read may be with the variable
        device = next((one for one in (*readers, handle.device) if one in found), None)
        if device is not None:
            found[device].setdefault(name.rpartition("/")[0] or name)
    return {device: [*layers] for device, layers in found.items()}


def plan_of(item: TrainingGraph, plan: Plan | None = None) -> Plan | None:
    """Return the given plan, else the plan of a rewritten item, from its report or archive."""
    if plan is not None:
        return plan
    if item.report is not None:
        own: Plan = item.report.plan
        return own
    return None if item.plan_bytes is None else Plan.from_bytes(item.plan_bytes)


def edges_of(item: TrainingGraph, plan: Plan | None = None) -> tuple[ShownEdge, ...]:
    """Return the reshards of `plan_of(item, plan)`; none without a plan."""
    found = plan_of(item, plan)
    return () if found is None else tuple(_edges(found, "edges"))


def model_edges_of(plan: Plan) -> tuple[ShownEdge, ...]:
    """Return the conversions of a plan on the model axis."""
    return tuple(_edges(plan, "model_edges"))


def _edges(plan: Plan, key: Literal["edges", "model_edges"]) -> Iterator[ShownEdge]:
    for index, edge in enumerate(getattr(plan, key)):
        place = plan.source.at((key, index))
        where = place if ":" in place else f"{key}[{index}] of the plan"
        yield ShownEdge(**vars(edge), where=where, along_model=key == "model_edges")
