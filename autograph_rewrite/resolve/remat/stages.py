"""Choose the rematerialisation of each pipeline stage, from the memory that it holds and its peak.

The peak of a stage is that of a micro-batch, plus the values that the other micro-batches under way hold:

    stage 0 of 3, 1f1b     F0 F1 F2 B0 ...          while B0 runs, micro-batches 1 and 2 hold their activations
    peak                   variables and inputs + the most of one micro-batch + 2 x what one holds between F and B

A micro-batch is one step of the whole model on one device. A stage holds the values that its nodes make, and those that
they read from other stages. A stage that is ahead sends its values early: up to two more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autograph_rewrite.analysis.list_elements import future_splits
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.variable_ops import handle_uses
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import Remat
from autograph_rewrite.plan.parts.pipeline_schedule import ideal_in_flight
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.remat.activations import Activations
from autograph_rewrite.resolve.remat.budget import RematChoice, choose
from autograph_rewrite.resolve.remat.policies import Parts
from autograph_rewrite.resolve.remat.step_memory import StepMemory, StepRun, gradients_of_variables
from autograph_rewrite.resolve.spans import differs_by_replica
from autograph_rewrite.resolve.stages.assignment import divide, owners_of
from autograph_rewrite.training_graph import Variable


def stages_of(acts: Activations, resolved: Plan) -> dict[Node, int]:
    """Return the stage of each forward and backward node."""
    assert resolved.pipeline is not None
    state, forward, lists = acts.state, set(acts.forward), future_splits(acts.state)
    each = [node for node in state.order if not has(node.op, "constant") and differs_by_replica(state, node, lists)]
    return divide(resolved, state, each, forward, acts.backward)[0]


def needs_of(
    acts: Activations, variables: Mapping[str, Variable], resolved: Plan, step: StepRun, stages: Mapping[Node, int]
) -> list[StageNeeds]:
    """Return the memory that each stage holds: its variables with their slots, and the sums of their gradients."""
    pipeline, graph = resolved.pipeline, acts.state.graph
    assert pipeline is not None
    owners, kept, everywhere = owners_of(resolved, acts.state, variables), [0] * pipeline.stages, 0
    for variable in variables.values():
        handle = graph.nodes.get(variable.handle)
        if handle is None:
            continue
        values = _reads(owners.get(handle, handle))
        if read := [stages[use.node] for value in values for use in value.uses if use.node in stages]:
            kept[min(read)] += variable.nbytes
        else:
            everywhere += variable.nbytes
    for value in gradients_of_variables(graph, resolved):
        kept[stages.get(value.node, 0)] += step.sizes.nbytes(acts.state.source(value))
    devices = pipeline.devices[: len(pipeline.devices) // resolved.replicas]
    schedule = "1f1b" if pipeline.schedule == "one_f_one_b" and not resolved.looped else "gpipe"
    return [
        StageNeeds(
            number,
            devices[number % len(devices)],
            ideal_in_flight(schedule, number, pipeline.stages, resolved.microbatches),
            nbytes + everywhere,
            is_last=number == pipeline.stages - 1,
        )
        for number, nbytes in enumerate(kept)
    ]


def _reads(handle: Node) -> list[Value]:
    return [value for use in handle_uses(handle) if has(use.node.op, "reads") for value in use.node.read_outputs]


@dataclass(frozen=True)
class StageNeeds:
    """The memory that a stage holds in addition to the values of its nodes.

    Attributes:
        under_way: how many micro-batches are between its forward and its backward, at most.
        kept: bytes of its variables, and of the sums of their gradients.
    """

    number: int
    device: str
    under_way: int
    kept: int
    is_last: bool = False


class StageMemory(StepMemory):
    """Computes peaks of one stage for any choice of recomputation."""

    def __init__(self, acts: Activations, step: StepRun, stages: Mapping[Node, int], needs: StageNeeds) -> None:
        super().__init__(acts, step)
        here = {node for node in self._at if stages.get(node) == needs.number}
        read = {value.node for node in here for value in node.inputs}
        self.kept = needs.kept + sum(sum(self._buffers[node].nbytes) for node in read if has(node.op, "held"))
        by_place = list(self._at)
        makers = [by_place[at] for at in self._maker]
        held_here = {self._of.get(value) for node in here for value in node.inputs}
        made = set(acts.forward)
        received = sum(self._nbytes[i] for i, one in enumerate(makers) if i in held_here and one in made - here)
        self.kept += received * _early(needs, step.sizes.micro)
        here_alone = zip(self._nbytes, makers, strict=True)
        self._nbytes = [n if maker in here or i in held_here else 0 for i, (n, maker) in enumerate(here_alone)]
        self._made = {i for i, maker in enumerate(makers) if maker in made}
        self._later = [  # buffers that gradients read, with the nodes whose copies they would read instead
            (i, moved) for i, at, _, moved in self._reads if by_place[at] in acts.backward and by_place[at] in here
        ]
        self._others = needs.under_way - 1

    def peak(self, segments: Iterable[Sequence[Node]]) -> int:
        """Return the most bytes that are alive at a time on the device of the stage.

        Args:
            segments: the nodes that are recomputed, by segment, producers first.
        """
        again = [list(nodes) for nodes in segments]
        held = sum(self._nbytes[i] for i in self._held_between(again) & self._made) if self._others else 0
        return super().peak(again) + self._others * held

    def _held_between(self, segments: Iterable[Sequence[Node]]) -> set[int]:
        """Return the buffers that gradients or copies of the stage read."""
        inside: set[Node] = set()
        held: set[int] = set()
        for nodes in segments:
            own = set(nodes)
            inside |= own
            held |= {self._of[v] for node in nodes for v in node.inputs if v.node not in own and v in self._of}
        return held | {i for i, moved in self._later if moved not in inside}


def _early(needs: StageNeeds, micro: int) -> int:
    """Return how many received values are alive before their turn, or until they have been sent."""
    return max(min(2, micro - needs.under_way), int(needs.is_last))


@dataclass(frozen=True)
class StageChoice:
    """The rematerialisation of one stage.

    Attributes:
        choice: the cheapest that fits.
    """

    needs: StageNeeds
    memory: StageMemory
    choice: RematChoice


def choose_by_stage(
    acts: Activations, step: StepRun, stages: Mapping[Node, int], given: Sequence[StageNeeds], remat: Remat
) -> list[StageChoice]:
    """Return the cheapest way to fit each device; stages of one device share it in proportion to their use.

    Args:
        step: a micro-batch of the whole model.
        stages: of the nodes.
        given: the stages, and the memory that they hold.
        remat: the limit of a device, and the stages that may recompute.

    Raises:
        PlanError: a stage does not fit; it names the least peak that was found.
    """
    assert remat.limit is not None
    memories = [StageMemory(acts, step, stages, needs) for needs in given]
    plain = [memory.peak(()) for memory in memories]
    found = []
    for i, needs in enumerate(given):
        beside = [j for j, other in enumerate(given) if other.device == needs.device]
        room = remat.limit - sum(memories[j].kept for j in beside)
        wanted = sum(plain[j] - memories[j].kept for j in beside)
        share = memories[i].kept + (room * (plain[i] - memories[i].kept) // wanted if wanted > room else room)
        forward = tuple(node for node in acts.forward if stages.get(node) == needs.number)
        part = replace(acts, forward=forward, repeatable=acts.repeatable & frozenset(forward))
        if not part.repeatable or (remat.stages and needs.number not in remat.stages):
            found.append(StageChoice(needs, memories[i], RematChoice((), 0.0, plain[i])))
            continue
        try:
            choice = choose(part, memories[i], share, remat.policy)
        except PlanError as error:
            raise PlanError(f"stage {needs.number} on {needs.device}: {error.problem}", hint=error.hint) from error
        found.append(StageChoice(needs, memories[i], choice))
    return found


def device_peaks(
    chosen: Sequence[StageChoice], segments: Mapping[int, Sequence[Sequence[Node]]]
) -> dict[str, tuple[int, int]]:
    """Return the peak of each device, without and with recomputation.

    Args:
        segments: by stage, the nodes of its segments.
    """
    found: dict[str, tuple[int, int]] = {}
    for one in chosen:
        before, after = found.get(one.needs.device, (0, 0))
        again = segments.get(one.needs.number, ())
        found[one.needs.device] = before + one.memory.peak(()), after + one.memory.peak(again)
    return found


def by_stage(parts: Parts, stages: Mapping[Node, int], wanted: Collection[int]) -> Parts:
    """Return the parts, cut where a stage begins: the stage that sends a value keeps it.

    Args:
        stages: of the forward nodes.
        wanted: the stages that may recompute; empty: all.
    """
    numbers: dict[tuple[int, int], int] = {}
    inside = {node: stages[node] for node in parts if node in stages and (not wanted or stages[node] in wanted)}
    return {node: numbers.setdefault((stage, parts[node]), len(numbers)) for node, stage in inside.items()}
