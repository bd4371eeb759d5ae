"""The static peak of one stage of a pipeline: that of a micro-batch, and what the others that are under way hold.

    stage 0 of 3, 1f1b     F0 F1 F2 B0 ...          while B0 runs, micro-batches 1 and 2 hold their activations
    peak                   variables and inputs + the most of one micro-batch + 2 x what one holds between F and B

A micro-batch is one step of the whole model on one device, of which a stage has what its nodes make, and what they read
of others. Where others are ahead, what they send is there early: up to two values more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autograph_rewrite.analysis.work.buffers import most_alive
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import Remat
from autograph_rewrite.resolve.remat.activations import Activations
from autograph_rewrite.resolve.remat.budget import choose
from autograph_rewrite.resolve.remat.search import Choice
from autograph_rewrite.resolve.remat.step_memory import Step, StepMemory


@dataclass(frozen=True)
class StageNeeds:
    """What a stage holds besides the values of its nodes.

    Attributes:
        number: of the stage.
        device: where it is.
        under_way: how many micro-batches are between its forward and its backward, at most.
        kept: bytes of its variables, and of the sums of their gradients.
        is_last: no stage comes behind it.
    """

    number: int
    device: str
    under_way: int
    kept: int
    is_last: bool = False


class StageMemory(StepMemory):
    """Tells peaks of one stage, whatever of it is computed again.

    Args:
        acts: what may be.
        step: a micro-batch of the whole model.
        stages: of the nodes.
        needs: of the stage.
    """

    def __init__(self, acts: Activations, step: Step, stages: Mapping[Node, int], needs: StageNeeds) -> None:
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
        self._later = [  # what gradients read, and which copies they would read instead
            (i, moved) for i, at, _, moved in self._reads if by_place[at] in acts.backward and by_place[at] in here
        ]
        self._others = needs.under_way - 1

    def peak(self, segments: Iterable[Sequence[Node]]) -> int:
        """Return the most bytes that are alive at a time on the device of the stage.

        Args:
            segments: the nodes that are computed again, by segment, producers first.
        """
        again = [list(nodes) for nodes in segments]
        born, freed, sizes = self.lifetimes(again)
        held = sum(self._nbytes[i] for i in self._held_between(again) & self._made) if self._others else 0
        return self.kept + most_alive(born, freed, sizes) + self._others * held

    def _held_between(self, segments: Iterable[Sequence[Node]]) -> set[int]:
        """Return the buffers that gradients, or copies, of the stage read."""
        inside: set[Node] = set()
        held: set[int] = set()
        for nodes in segments:
            own = set(nodes)
            inside |= own
            held |= {self._of[v] for node in nodes for v in node.inputs if v.node not in own and v in self._of}
        return held | {i for i, moved in self._later if moved not in inside}


def _early(needs: StageNeeds, micro: int) -> int:
    """Return how many values are there before their turn, or until they have been sent."""
    return max(min(2, micro - needs.under_way), int(needs.is_last))


@dataclass(frozen=True)
class StageChoice:
    """What is computed again in one stage.

    Attributes:
        needs: of the stage.
        memory: tells its peaks.
        choice: the cheapest that fits.
    """

    needs: StageNeeds
    memory: StageMemory
    choice: Choice


def choose_by_stage(
    acts: Activations, step: Step, stages: Mapping[Node, int], given: Sequence[StageNeeds], remat: Remat
) -> list[StageChoice]:
    """Return the cheapest way to fit each device; stages of one device share it as they would use it.

    Args:
        acts: what may be computed again.
        step: a micro-batch of the whole model.
        stages: of the nodes.
        given: the stages, and what they hold.
        remat: the limit of a device, and in which stages something is computed again.

    Raises:
        PlanError: a stage does not fit; it says the least peak that was found.
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
        part = _of_stage(acts, stages, needs.number)
        if not part.repeatable or (remat.stages and needs.number not in remat.stages):
            found.append(StageChoice(needs, memories[i], Choice((), 0.0, plain[i])))
            continue
        try:
            choice = choose(part, memories[i], share, remat.policy)
        except PlanError as error:
            raise PlanError(f"stage {needs.number} on {needs.device}: {error.problem}", hint=error.hint) from error
        found.append(StageChoice(needs, memories[i], choice))
    return found


def _of_stage(acts: Activations, stages: Mapping[Node, int], stage: int) -> Activations:
    forward = tuple(node for node in acts.forward if stages.get(node) == stage)
    return replace(acts, forward=forward, repeatable=acts.repeatable & frozenset(forward))


def device_peaks(
    chosen: Sequence[StageChoice], segments: Mapping[int, Sequence[Sequence[Node]]]
) -> dict[str, tuple[int, int]]:
    """Return the peak of each device, without and with what is computed again.

    Args:
        chosen: for each stage.
        segments: by stage, the nodes of what is computed again.
    """
    found: dict[str, tuple[int, int]] = {}
    for one in chosen:
        before, after = found.get(one.needs.device, (0, 0))
        again = segments.get(one.needs.number, ())
        found[one.needs.device] = before + one.memory.peak(()), after + one.memory.peak(again)
    return found
