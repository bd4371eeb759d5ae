"""Explain a value's placement by its provenance and the chain from the batch; explain what limits a variable's."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from autograph_rewrite.analysis.variable_uses import roles
from autograph_rewrite.compile import resolve_plan, with_processes
from autograph_rewrite.config import presets
from autograph_rewrite.config.config import Config
from autograph_rewrite.cost.tasks.step import cut_model
from autograph_rewrite.diagnostics.amounts import few, several, size
from autograph_rewrite.errors import ConfigError, GraphError, RewriteError
from autograph_rewrite.inspect.communication import bare, origin_of
from autograph_rewrite.inspect.export import results
from autograph_rewrite.inspect.graph_source import Source, as_item
from autograph_rewrite.inspect.report_view import STEP, ShownEdge, edges_of
from autograph_rewrite.inspect.summary import VariableLine, summarise
from autograph_rewrite.inspect.values import Described, Values, conversion, conversion_data, converts, over
from autograph_rewrite.ir.attr_inference import closest
from autograph_rewrite.ir.format.literals import shape_text
from autograph_rewrite.ir.format.printer import line
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Node, Value
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.ir.types.placement import Placement
from autograph_rewrite.ir.variable_ops import handle_uses
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.residence import Residence
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import request
from autograph_rewrite.strategies import STRATEGIES, named_builder
from autograph_rewrite.strategies.auto import with_settings
from autograph_rewrite.strategies.per_variable import PerVariable
from autograph_rewrite.training_graph import TrainingGraph

FIRST = ("replica_0/", "replica_0/micro_0/")
UNPLACED = (
    "Its placement is not known: a .pb has no place for placements. Give the .ar that `rewrite -o` wrote, or the "
    "original graph with --config."
)
INDEPENDENT = "Nothing of the batch reaches it, so every replica has the same."


@dataclass(frozen=True)
class Provenance:
    """The origin of a node, and the placement of one of its results.

    Attributes:
        made_by: the pass that made the node; empty for a node of the original graph.
        origin: the original of a copy, or the original node for which a pass made it.
        edges: the reshards of the original node's values.
        value: the description of the result; None for a node without results.
        chain: from a batch input to the result.
    """

    node: str
    line: str
    made_by: str
    origin: str
    edges: tuple[ShownEdge, ...]
    value: Described | None = None
    chain: tuple[ChainLink, ...] = ()

    def __str__(self) -> str:
        text = [self.line]
        if not self.made_by:
            text.append("It is a node of the original graph.")
        elif self.made_by == "expand":
            text.append(f"It is a copy of '{self.origin}' for one replica, made by the pass 'expand'.")
        else:
            serves = f" for '{self.origin}'" if self.origin and self.origin != self.node else ""
            text.append(f"The pass '{self.made_by}' made it{serves}.")
        text += self._placed()
        for edge in self.edges:
            owner = "the step" if edge.owner == STEP else f"variable '{edge.owner}'"
            text.append(
                f"{edge.where}: {edge.value} {edge.from_} -> {edge.to} by {edge.means}, "
                f"for {owner}, {size(edge.bytes)}: {edge.reason}"
            )
        return "\n".join(text) + "\n"

    def _placed(self) -> Iterator[str]:
        """Yield the lines on its placement and the reasons for it."""
        if self.value is not None and (self.value.placement is not None or self.made_by):
            yield str(self.value)
        if self.chain:
            yield "From the batch on:"
            yield from lines(self.chain)
        elif self.value is not None and self.value.placement is not None:
            yield INDEPENDENT
        elif self.made_by == "expand":
            yield UNPLACED

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        edges = [
            {**conversion_data(edge), "value": edge.value, "lowering": edge.lowering, "compressor": edge.compressor}
            for edge in self.edges
        ]
        return {
            "node": self.node,
            "line": self.line,
            "pass": self.made_by,
            "origin": self.origin,
            "value": self.value.data() if self.value is not None else None,
            "chain": [step.data() for step in self.chain],
            "edges": edges,
        }


def why(source: Source, name: str, plan: Plan | None = None) -> Provenance:
    """Return why a node is in a graph, and why one of its results is placed as it is.

    Args:
        name: a node or value (`name:1`) of the original graph or of the rewritten one, or a variable, for its read.
        plan: the plan of the rewrite; default: that of a rewritten item, also from an archive.

    Raises:
        GraphError: the node or value does not exist; the hint names the closest.
    """
    item = as_item(source)
    asked, _, index = name.removeprefix("%").partition(":")
    with no_garbage_collection():
        node = find(item, asked)
        asked = node.name if asked == node.name else bare(node.name)
        values = Values(item, plan)
        made = results(node)
        at = item.graph.value(f"{node.name}:{index}").index if index else 0
        is_original = asked != node.name
        made_by = node.attr(PASS_ATTR, b"").decode()
        origin = origin_of(node) if made_by else ""
        alike = tuple(one for one in item.graph if bare(one.name) == asked) if is_original else ()
        shown_as = f"{asked}:{at}" if is_original and at else asked if is_original else None
        described = values.described(made[at], shown_as, alike) if made else None
        found = tuple(edge for edge in edges_of(item, values.plan) if edge.node == (origin or node.name))
        chain = Chains(values).of(node, at) if item.placements or values.plan is not None else ()
    return Provenance(node.name, line(node), made_by, origin, found, described, chain)


def find(item: TrainingGraph, name: str) -> Node:
    """Return a node by its name, the first instance of the original node of that name, or the read of a variable.

    Raises:
        GraphError: none exists; the hint names the closest.
    """
    graph = item.graph
    for one in (name, *(f"{prefix}{name}" for prefix in FIRST)):
        if one in graph:
            return graph.nodes[one]
    variable = item.variables.get(name)
    if variable is None:
        names = dict.fromkeys((*graph.nodes, *map(bare, graph.nodes), *item.variables))
        raise GraphError(f"the graph has no node '{name}'", hint=closest(name, names))
    handle = graph.nodes.get(variable.handle)
    read = next((use.node for use in handle_uses(handle) if has(use.node.op, "reads")), None) if handle else None
    if read is None:
        hint = "`autograph-rewrite why-not GRAPH VARIABLE STRATEGY` says where it lives"
        raise GraphError(f"'{name}' is a variable, and no node reads it by one handle", hint=hint)
    return read


# The chain of reasons for a placement: from a batch input, value by value, to the value in question.
#
#     %x: replicated, because it is a batch input: its axis 0 counts examples
#       -> split(0)[data] by slice: cut here, because MatMul 'h' reads it
#     %h: split(0)[data], because MatMul works on each block of %x
#     %dw: partial(sum)[data], because MatMul adds up over dimension 0 of %h: each replica has its part
#       -> replicated by collective_reduce, 96 bytes: summed here, because ResourceApplyAdam 'update' reads it
#
# It follows from the graph and the placements of its values, which a rewrite or its archive states.

ALIKE = 3
"""Up to this many consecutive values of one placement are shown one by one; of more, only the first and the last."""
_COMBINED = {"max": "takes the maximum", "min": "takes the minimum", "prod": "multiplies"}


@dataclass(frozen=True)
class ChainLink:
    """One link of a chain.

    Attributes:
        placement: of the value, or after its conversion.
        because: the reason.
        converts: the link is a conversion of the value.
        where: the place of the conversion in the plan.
        owner: the variable whose update reads the converted value, or `step`.
    """

    value: str
    op: str
    placement: str
    because: str
    converts: bool = False
    where: str = ""
    owner: str = ""

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        data = {"value": self.value, "op": self.op, "placement": self.placement, "because": self.because}
        return {**data, "converts": True, "where": self.where, "owner": self.owner} if self.converts else data


class ReadValue(NamedTuple):
    """The value that a node reads, before any conversion, and the placement that the node reads."""

    value: Value
    seen: Placement
    converted: bool


@dataclass
class Chains:
    """Finds the chains of one graph."""

    values: Values

    @cached_property
    def inputs(self) -> Mapping[str, int]:
        """The nodes of batch inputs, each with the axis that counts examples."""
        infos = self.values.item.inputs.values()
        return {one.tensor.partition(":")[0]: one.batch_axis for one in infos if one.batch_axis is not None}

    def of(self, node: Node, index: int = 0) -> tuple[ChainLink, ...]:
        """Return the chain of a result of a node, or of a node without results; empty if no placement is known."""
        made = results(node)
        start = made[index] if index < len(made) else None
        links: list[tuple[Node, Value | None, ReadValue | None]] = []
        seen: set[Node] = set()
        distance = self._distances(node)
        at: Node | None = node
        while at is not None and at not in seen:
            seen.add(at)
            source = None if at.name in self.inputs else self._cause(at, start, distance)
            links.append((at, start, source))
            at, start = (source.value.node, source.value) if source is not None else (None, None)
        return tuple(step for link in reversed(links) for step in self._steps(*link))

    def _distances(self, node: Node) -> dict[Node, int]:
        """Return the distance from a batch input, in edges, of each ancestor of a node; others are left out."""
        above = ancestors([node], controls=False)
        found = {one: 0 for one in above if one.name in self.inputs}
        queue = deque(found)
        while queue:
            one = queue.popleft()
            for value in one.read_outputs:
                for use in value.uses:
                    if use.node in above and use.node not in found:
                        found[use.node] = found[one] + 1
                        queue.append(use.node)
        return found

    def _cause(self, node: Node, value: Value | None, distance: Mapping[Node, int]) -> ReadValue | None:
        """Return the operand that decides a node's placement; of several candidates, the one nearest to the batch."""
        if converts(node):
            found = self._converted(node, distance)
            before = self._placement(found)
            return None if found is None or before is None else ReadValue(found, before, True)
        own = self._placement(value)
        sources = [one for operand in node.inputs for one in self._sources(operand, distance)]

        def key(one: ReadValue) -> tuple[int, int]:
            spread = one.seen.is_split or one.seen.is_partial
            alike = spread and own is not None and one.seen.kind == own.kind
            rank = 0 if alike else 1 if spread or one.converted else 2 if one.seen.differs else 3
            return rank, distance[one.value.node]

        return min(sources, key=key, default=None)

    def _sources(self, operand: Value, distance: Mapping[Node, int]) -> Iterator[ReadValue]:
        """Yield an operand, or the value that was converted to it."""
        if operand.node not in distance:
            return
        stated = self.values.placement(operand)
        if stated is not None and not converts(operand.node):
            yield ReadValue(operand, stated.placement, False)
            return
        found = self._converted(operand.node, distance)
        if found is None:
            return
        before = self._placement(found)
        seen = stated.placement if stated is not None else before
        if seen is not None:
            yield ReadValue(found, seen, seen != before or converts(operand.node))

    def _converted(self, node: Node, distance: Mapping[Node, int]) -> Value | None:
        """Return the value that a node converts: found by name, by origin, or as the nearest placed ancestor."""
        graph, name = self.values.item.graph, bare(node.name)
        prefix = node.name.removesuffix(name)
        above = [name[:at] for at in range(len(name) - 1, 0, -1) if name[at] == "/"]
        for one in (*above, node.attr(ORIGIN_ATTR, b"").decode()):
            for instance in (prefix + one, one):
                if instance in graph and self._is_known(graph.nodes[instance].output(), distance):
                    return graph.nodes[instance].output()
        pending, seen = deque([node]), {node}
        while pending:
            for value in pending.popleft().inputs:
                if self._is_known(value, distance):
                    return value
                if value.node in distance and value.node not in seen:
                    seen.add(value.node)
                    pending.append(value.node)
        return None

    def _is_known(self, value: Value, distance: Mapping[Node, int]) -> bool:
        return value.node in distance and not converts(value.node) and self.values.placement(value) is not None

    def _placement(self, value: Value | None) -> Placement | None:
        stated = self.values.placement(value) if value is not None else None
        return stated.placement if stated is not None else None

    def _steps(self, node: Node, value: Value | None, source: ReadValue | None) -> Iterator[ChainLink]:
        own, name = self._placement(value), bare(value.name if value is not None else node.name)
        reason = ""
        if node.name in self.inputs:
            reason = f"it is a batch input: its axis {self.inputs[node.name]} counts examples"
        elif source is not None:
            reason = because(node.op, own, source.seen, f"%{bare(source.value.name)}", converted=source.converted)
        if reason:
            yield ChainLink(name, node.op, over(own) if own is not None else "", reason)
        if value is None:
            return
        edges = self.values.conversions(value)
        for edge in edges:
            yield ChainLink(name, node.op, conversion(edge), self._needed(value, edge), True, edge.where, edge.owner)
        stated = self.values.placement(value)
        if stated is not None and stated.readers is not None and not edges:
            yield ChainLink(name, node.op, f"-> {over(stated.readers)}", "its readers need it so", True)

    def _needed(self, value: Value, edge: ShownEdge) -> str:
        others = max(0, len(self._readers(value)) - 1)
        more = f", and {several(others, 'more node')}" if others else ""
        if edge.along_model:
            return f"{_verb(edge)} between {edge.reason} ({edge.where})"
        owner = f"for variable '{edge.owner}', " if edge.owner != STEP else ""
        return f"{_verb(edge)} here, because {edge.reason}{more} ({owner}{edge.where})"

    def _readers(self, value: Value) -> set[str]:
        """Return the original nodes that read a value after its conversion."""
        found: set[str] = set()
        begin, pending, seen = f"{bare(value.node.name)}/", [value], {value}
        while pending:
            for use in pending.pop().uses:
                name = bare(use.node.name)
                if name.startswith(begin) and PASS_ATTR in use.node.attrs and converts(use.node):
                    new = [one for one in use.node.read_outputs if one not in seen]
                    seen.update(new)
                    pending += new
                elif not converts(use.node):
                    found.add(name)
        return found


def because(op: str, own: Placement | None, seen: Placement, operand: str, *, converted: bool) -> str:
    """Return why an op gives a value its placement.

    Args:
        own: the placement of the value; None for a node without results.
        seen: the placement of the operand, as the op reads it.
        operand: its name.
        converted: the operand was converted.
    """
    if own is None or own.kind == "replicated":
        if converted:
            return f"{op} reads {operand} as it was converted"
        return f"{op} reads {operand}" if seen.differs else f"{op} reads {operand}, which every replica has"
    if own.is_split and seen.is_split:
        if own.dim == seen.dim:
            return f"{op} works on each block of {operand}"
        return f"{op} makes dimension {own.dim} of dimension {seen.dim} of {operand}"
    if own.is_partial and seen.is_split:
        combined = _COMBINED.get(own.op, "adds up") if own.op != "own" else "differs"
        return f"{op} {combined} over dimension {seen.dim} of {operand}: each replica has its part"
    if own.is_partial and seen.is_partial:
        return f"{op} of the parts of {operand} makes the parts of its result"
    if own.kind == "local":
        return f"{op} counts the replica's own block of {operand}"
    return f"{op} reads {operand}"


def lines(steps: Sequence[ChainLink]) -> Iterator[str]:
    """Yield the lines of a chain; of many consecutive values with one placement, only the first and the last."""
    for (placement, is_conversion), alike in groupby(steps, key=lambda step: (step.placement, step.converts)):
        run = list(alike)
        if is_conversion:
            yield from (f"    {step.placement}: {step.because}" for step in run)
            continue
        head = f"{placement}, because " if placement else ""
        texts = [f"%{step.value}: {head}{step.because}" for step in run]
        if len(run) > ALIKE:
            ops = list(dict.fromkeys(step.op for step in run[1:-1]))
            texts[1:-1] = [f"... {several(len(run) - 2, 'more value')}, placed alike: {few(ops)}"]
        yield from (f"  {text}" for text in texts)


def _verb(edge: ShownEdge) -> str:
    if edge.from_.startswith("partial"):
        return "summed" if edge.from_ == "partial(sum)" else "combined"
    if edge.to.startswith("split"):
        return "cut"
    if edge.from_ == "local":
        return "counted over all replicas"
    return "gathered" if edge.from_.startswith("split") else "converted"


# Why a strategy does not shard a variable, put it on servers or split it on the model axis, or what it would do.
#
# This code knows no limits. The reasons come from the strategy's builder and from the errors of the configuration's
# checks and the passes; the exchanges come from the resolved plan.

MODEL = "model"
"""The name of the model axis, an alternative to the names of strategies."""
DEVICES = {"devices": ["CPU:0", "CPU:1"]}
STAGES = {1: "of its slots", 2: "of its slots and gradient", 3: "of it, its slots and gradient"}


@dataclass(frozen=True)
class VariablePlace:
    """The place of one variable under a strategy.

    Attributes:
        variable: its name, type and size, as text.
        lives: where it would live; empty if the strategy cannot be followed.
        because: why it is not divided further; empty if it is divided.
        exchanged: the exchanges for it in a step.
    """

    variable: str
    strategy: str
    lives: str
    because: str = ""
    exchanged: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.variable} under {self.strategy}:"]
        lines += [f"  {self.lives}"] if self.lives else []
        joined = bool(self.lives) and not self.because.startswith("not ")
        lines += [f"  {'not further, because ' * joined}{self.because}"] if self.because else []
        lines += [f"  in a step {one}" for one in self.exchanged]
        return "\n".join(lines) + "\n"

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "variable": self.variable,
            "strategy": self.strategy,
            "lives": self.lives or None,
            "because": self.because or None,
            "exchanged": list(self.exchanged),
        }


def why_not(
    item: TrainingGraph, variable: str, strategy: str, config: Config | None = None, *, batch: int | None = None
) -> VariablePlace:
    """Return where a variable lives under a strategy, and why it is not divided further.

    Args:
        item: the original graph.
        strategy: a strategy's name, "model" for the model axis, or the name or path of a configuration.
        config: the devices and all other settings; default: those of the configuration `strategy`, else two devices.
        batch: examples of all devices together, where the graph leaves that open.

    Raises:
        GraphError: the variable does not exist, or the graph is distributed already.
        ConfigError: the strategy does not exist.
    """
    flat = normalise_original(item)
    lines = {line.name: line for line in summarise(flat).variables}
    if variable not in lines:
        hint = closest(variable, lines) or "`autograph-rewrite inspect GRAPH` lists them"
        raise GraphError(f"the graph has no variable '{variable}'", hint=hint)
    line = lines[variable]
    chosen = _config(strategy, config)
    about = _about(line, lines)
    if line.slot_of is not None:
        because = f"it is a slot of '{line.slot_of}' and lives where that does: ask for '{line.slot_of}'"
        return VariablePlace(about, strategy, "", because)
    if strategy == MODEL:
        return VariablePlace(about, "the model axis", *_on_model_axis(flat, line, chosen))
    if not roles(flat)[variable].trained:
        return VariablePlace(
            about, strategy, "", "no gradient updates it in a step, and strategies place what is trained"
        )
    return _under(flat, line, about, chosen, batch)


def _config(strategy: str, config: Config | None) -> Config:
    if strategy == MODEL or strategy in STRATEGIES:
        base = with_processes(config or Config.of(DEVICES))
        if strategy == MODEL:
            return base
        return with_settings(base, strategy=base.strategy.model_copy(update={"name": strategy}))
    if presets.found(strategy) == strategy and "/" not in strategy and not strategy.endswith((".yaml", ".json")):
        names = (*STRATEGIES, MODEL, *presets.names())
        raise ConfigError(f"'{strategy}' is no strategy or configuration", hint=closest(strategy, names))
    chosen = with_processes(Config.load(strategy))
    if config is None:
        return chosen
    return with_settings(chosen, devices=config.devices, cluster=config.cluster)


def _about(line: VariableLine, lines: dict[str, VariableLine]) -> str:
    slots = sum(lines[slot].bytes or 0 for slot in line.slots if slot in lines)
    beside = f" and {size(slots)} in {several(len(line.slots), 'slot')}" if line.slots else ""
    return f"'{line.name}' ({line.dtype}{shape_text(line.shape)}, {size(line.bytes or 0)}{beside})"


def _under(flat: TrainingGraph, line: VariableLine, about: str, config: Config, batch: int | None) -> VariablePlace:
    strategy, name = config.strategy.name, line.name
    try:
        builder = named_builder(config, batch)
        plan = builder.build(flat, config)
        choice = builder.choices(flat, config)[name] if isinstance(builder, PerVariable) else None
        resolved = resolve_plan(flat, config, batch)
    except RewriteError as error:
        return VariablePlace(about, strategy, "", f"it cannot be followed: {error.problem}")
    residence = plan.residences.get(name)
    edges = [edge for edge in edges_of(flat, resolved) if edge.owner == name or edge.owner.startswith(f"{name}/part_")]
    split = residence is not None and bool(residence.sizes)
    because = choice.because if choice is not None and not split else ""
    return VariablePlace(about, strategy, _lives(residence, plan), because, tuple(_exchanged(edges)))


def _lives(residence: Residence | None, plan: Plan) -> str:
    """Return where a variable lives, in words."""
    if residence is None or residence.placement == "replicated":
        return "whole, a copy on each replica" if plan.mode == "mirrored" else "whole, one copy for each process"
    places = few([device_specs.short(device) for device in dict.fromkeys(residence.servers or plan.devices)])
    if not residence.sizes:
        return f"whole, on {places}, with its slots and its update"
    shards = f"{several(len(residence.sizes), 'shard')} of {few([str(one) for one in residence.sizes])}"
    whose = f", the shards {STAGES[residence.stage]}" if residence.stage else ", with their slots and updates"
    return f"{residence.placement} in {shards}, on {places}{whose}"


def _exchanged(edges: list[ShownEdge]) -> Iterator[str]:
    for edge in edges[:4]:
        yield f"%{edge.value} {conversion(edge)}"
    if len(edges) > 4:
        yield f"{len(edges) - 4} more exchanges"


def _on_model_axis(flat: TrainingGraph, line: VariableLine, config: Config) -> tuple[str, str]:
    """Return along which dimensions the model axis can split a variable in two, and why not along the others."""
    can, cannot = [], []
    for dim in range(len(line.shape or ())):
        split = [2 if one == dim else 1 for one in range(len(line.shape or ()))]
        try:
            found, edges = cut_model(flat, request(flat, _cut(line.name, split, config), strategy="AllReduce"))
        except RewriteError as error:
            cannot.append(f"not along dimension {dim}: {error.problem}")
            continue
        if line.name not in found:
            cannot.append(f"not along dimension {dim}: its readers and its update want it whole")
            continue
        exchanged = [edge for edge in edges if edge.lowered.hops]
        nbytes = f", {size(sum(edge.bytes for edge in exchanged))} of known shapes" if exchanged else ""
        can.append(f"along dimension {dim}: its devices exchange {several(len(exchanged), 'value')} in a step{nbytes}")
    lives = f"can be cut in two {'; or '.join(can)}" if can else ""
    if not line.shape:
        cannot.append("it is a scalar" if line.shape == () else "its shape is not known")
    return lives, "; ".join(cannot)


def _cut(name: str, split: list[int], config: Config) -> Config:
    """Return a configuration with two logical devices for each replica, which split one variable."""
    devices = list(config.devices or DEVICES["devices"])
    devices = devices if len(devices) % 2 == 0 else [*devices, *devices]
    entry = {"match": re.escape(name), "split": split}
    return Config.of({"devices": devices, "mesh": {"model": 2}, "sharding": [entry]})
