"""Run parameter-server ops on the chief only; send the other workers the values and completion tokens they need.

    before, on all       push ──► take ──► update ──^──► train            norm ──► a local reader
    after, on worker 0   push ──► take ──► update ──^──► enqueue for each other worker ──^──► train
    after, on others     push ──^──► dequeue ──^──► train                 dequeue ──► a local reader

For each node that waits for server ops, worker 0 sends every worker a token as soon as these are done; it sends a value
as soon as it is there. Before a worker waits, it sends everything that server ops need of it. A worker reads a variable
before it pushes a gradient for it, so that no read sees a part of a step's updates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import Guard, Guards, frames_of, guards_of, opened, unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node, Use, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, PROCESS, SERVER
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.traversal import ancestors, dependencies, marks_before, reachable, topological_order, users
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_update
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.ops.traits import MERGES, SWITCHES, has
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.order_accesses import Runs
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite, Site
from autograph_rewrite.passes.collectives.server_stores import ServerBuilder
from autograph_rewrite.passes.parameter_server.await_writes import await_writes
from autograph_rewrite.passes.parameter_server.turns import Turns
from autograph_rewrite.plan.parts.names import proxy_of
from autograph_rewrite.training_graph import Variable

SUFFIX = "/on_server"


def _name_server_roots(rewrite: Rewrite) -> None:
    """Give each server op that is run or read by name a node of that name in every process."""
    graph, item = rewrite.graph, rewrite.item
    # Programs also run the initialisers of single variables, one by one.
    alone = [one.initializer for one in item.variables.values() if one.initializer] if rewrite.workers > 1 else []
    for name in dict.fromkeys((*item.targets, *alone)):
        node = graph.nodes.get(name)
        if node is not None and node.is_driven:
            take_name(graph, node, graph.unique_name(name + SUFFIX))
            Builder(graph, name, name).node("NoOp", controls=[node])
    for name in dict.fromkeys(info.tensor.partition(":")[0] for info in item.outputs.values()):
        node = graph.nodes.get(name)
        if node is None or not node.is_driven:
            continue
        take_name(graph, node, graph.unique_name(name + SUFFIX))
        outputs = node.outputs
        op = "Identity" if len(outputs) == 1 else "IdentityN"
        new = Builder(graph, name, name).node(op, *outputs)
        moved = {value: new.output(value.index) for value in outputs}
        for anchor, value in graph.anchors.items():
            graph.set_anchor(anchor, moved.get(value, value))


def _delegate(rewrite: Rewrite) -> None:
    """Run parameter-server ops on worker 0 only; the others get completion tokens and the values that they read.

    If workers do not wait for each other, each runs its updates, and worker 0 only the initialisers.

    Raises:
        PassError: a value that crosses between servers and workers is computed in a branch or loop.
    """
    graph = rewrite.graph
    if rewrite.plan.is_asynchronous:
        for node in ancestors(rewrite.targets):
            node.leave(PROCESS)
    _switch_in_every_process(topological_order(graph))
    on_server = _with_branches(topological_order(graph))
    for node in on_server:
        node.put(PROCESS, 0)
    _read_before_pushing(rewrite)
    order = topological_order(graph)
    needs = _RequiredPushes(rewrite, order, on_server)
    values = [value for node in order if node in on_server for value in node.outputs]
    branches = Branches(graph, order, on_server)
    exports = [value for value in values if any(reader not in on_server for reader, _ in value.uses)]
    exports += [value for value in branches.predicates() if value not in exports]
    _require_in_every_run(exports, branches.unconditional)
    waiting = [node for node in order if node not in on_server and any(c in on_server for c in node.controls)]
    own = _own_updates(rewrite)
    exchange = _ChiefSide(rewrite) if rewrite.rank == 0 else _WorkerSide(rewrite, needs)
    handed = {value: exchange.value(value) for value in exports}
    for value, new in handed.items():
        value.replace_all_uses_with(new, keep=on_server | exchange.senders)
    joined = branches.joined()
    for node in waiting:
        awaited = [control for control in node.controls if control in on_server]
        if node in branches.unconditional:
            _wait(rewrite, exchange, node, awaited, branches)
        elif rewrite.rank != 0:
            branches.leave_out(node, awaited, handed)
    for node, awaited in joined.items():
        _wait(rewrite, exchange, node, awaited, branches)
    if isinstance(exchange, _ChiefSide) and exchange.turns is not None:
        _begin_together(rewrite, exchange.turns)
    if rewrite.rank != 0:
        _forget(rewrite, on_server)
        _keep_own_updates(rewrite, own)
    eliminate_dead_code(graph, rewrite.roots)


def _switch_in_every_process(order: Sequence[Node]) -> None:
    """Give every worker a separate Switch for a server's value that it reads in a branch.

    A value that is sent must exist in every run: the operand of a Switch does, each of its outputs does not.
    """
    for node in reversed(order):  # of a branch inside of another, the inner Switch first
        if node.op not in SWITCHES or not node.is_driven:
            continue
        uses = [use for value in node.outputs for use in value.uses if not use.node.is_driven]
        if not uses:
            continue
        waits = [control for control in node.controls if not control.is_driven]
        own = Builder.at(node, "own", span=node.span).node(node.op, *node.inputs, controls=waits, selects=node.selects)
        for reader, index in uses:
            reader.set_input(index, own.output(reader.inputs[index].index), reader.selects.get(index))


def _wait(
    rewrite: Rewrite, exchange: _ChiefSide | _WorkerSide, node: Node, awaited: Sequence[Node], branches: Branches
) -> None:
    """Make a node wait for a token instead of server ops; on worker 0, its readers wait if these are in branches."""
    is_behind_branches = any(control not in branches.unconditional for control in awaited)
    if rewrite.rank != 0 or not is_behind_branches:
        for control in awaited:
            node.remove_control(control)
        node.add_control(exchange.token(node, awaited, awaited))
        return
    readers = users(node)
    token = exchange.token(node, awaited, [node])  # it runs whichever branch did
    for reader in readers:
        reader.add_control(token)


def _begin_together(rewrite: Rewrite, turns: Turns) -> None:
    """Let updates that need nothing of other workers wait until these have begun, and so read the old value.

    An example is the update of a step counter. Updates that wait for contributions of all workers need no such wait.
    """
    step, order = ancestors(rewrite.targets), topological_order(rewrite.graph)
    unconditional = unconditional_nodes(order)
    marked = {push: 1 for push in _pushes(rewrite) if push in step}
    behind = marks_before(order, {**marked, turns.all_began: 1})
    early = [node for node in order if node in step and node.is_driven and is_update(node) and not behind[node]]
    # Of an update in a branch or loop, its inputs wait.
    for node in reachable(early, lambda node: () if node in unconditional else dependencies(node)):
        if node in unconditional:
            node.add_control(turns.all_began)


def _own_updates(rewrite: Rewrite) -> set[str]:
    """Return the names of the updates that the step runs in every process."""
    return {node.name for node in ancestors(rewrite.targets) if is_update(node) and not node.is_driven}


def _keep_own_updates(rewrite: Rewrite, own: set[str]) -> None:
    """Let the step run the updates of every process, even if only nodes of worker 0 have waited for them.

    Raises:
        PassError: such an update is in a branch or loop, so the step cannot wait for it.
    """
    graph = rewrite.graph
    lost = [graph.nodes[name] for name in sorted(own - _own_updates(rewrite)) if name in graph.nodes]
    if not lost:
        return
    target = next(iter(rewrite.targets), None)
    unconditional = unconditional_nodes(topological_order(graph))
    for node in lost:
        if target is None or node not in unconditional:
            raise PassError(
                f"'{node.name}' would run on worker 0 only, because a parameter server waits for it",
                node=node,
                hint="use strategy AllReduce, or give the variables of this branch synchronizer: all_reduce",
            )
        target.add_control(node)


class _ChiefSide:
    """Sends to all others.

    Attributes:
        senders: the nodes that still read the original values.
        turns: None if nothing is sent.
    """

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self.turns: Turns | None = None
        self.senders: set[Node] = set()

    def _turn(self, node: Node) -> Turns:
        self.turns = self.turns or Turns(self._rewrite, node)
        return self.turns

    def value(self, value: Value) -> Value:
        """Send a value; return what worker 0 reads instead, once it is sent."""
        home = _home(self._rewrite, value.node, f"{value.node.name}/handed_{value.index}")
        axis = home.const(0, dtypes.INT32, "axis")
        row = home.add("ExpandDims", (value, axis), "row")
        sent = self._turn(value.node).send(home, home.wrapped(row.output(), "wrapped"), ())
        new = home.add("Identity", (value,), "sent", controls=[sent])
        self.senders |= {row, new}
        return new.output()

    def token(self, reader: Node, awaited: Sequence[Node], done: Sequence[Node]) -> Node:
        """Send tokens once `done` have run; return the node that `reader` waits for."""
        home = _home(self._rewrite, awaited[0], f"{reader.name}/token")
        true = home.const(True, dtypes.BOOL, "true")
        return self._turn(awaited[0]).send(home, true, done)


class _WorkerSide:
    """Receives from worker 0."""

    def __init__(self, rewrite: Rewrite, needs: _RequiredPushes) -> None:
        self._rewrite, self._needs = rewrite, needs
        self._turns: Turns | None = None
        self.senders: frozenset[Node] = frozenset()

    def _receive(self, home: ServerBuilder, dtype: int, nodes: Sequence[Node]) -> Node:
        self._turns = self._turns or Turns(self._rewrite, nodes[0])
        return self._turns.receive(home, dtype, self._needs.of(nodes))

    def value(self, value: Value) -> Value:
        """Receive a value from worker 0."""
        home = _home(self._rewrite, value.node, f"{value.node.name}/handed_{value.index}")
        taken = self._receive(home, dtypes.VARIANT, [value.node]).output()
        row = home.unwrapped(taken, value.dtype, "row")
        return home.add("Squeeze", (row,), "received", squeeze_dims=[0]).output()

    def token(self, reader: Node, awaited: Sequence[Node], done: Sequence[Node]) -> Node:
        """Receive the token that worker 0 sends once `awaited` have run; return the node that `reader` waits for."""
        home = _home(self._rewrite, awaited[0], f"{reader.name}/token")
        return self._receive(home, dtypes.BOOL, awaited)


def _home(rewrite: Rewrite, node: Node, name: str) -> ServerBuilder:
    server = min(rewrite.plan.homes.values())  # for nodes that are on no server
    return ServerBuilder(rewrite, rewrite.home_of(node) or server, node, name)


class _RequiredPushes:
    """The nodes that server ops need of every process: pushes, collectives, and the values that it received before.

    Args:
        on_server: the nodes that worker 0 runs.
    """

    def __init__(self, rewrite: Rewrite, order: Sequence[Node], on_server: set[Node]) -> None:
        pushes = set(_pushes(rewrite)).intersection(order)
        joint = pushes.union(node for node in order if is_collective(node.op))
        behind = marks_before(order, dict.fromkeys(joint, 1))
        unconditional = unconditional_nodes(order)
        _require_certain(pushes, unconditional)
        self._nodes: list[Node] = []
        self._masks: dict[Node, int] = {}  # of server ops, and of nodes in branches or loops
        bits: dict[Node, int] = {}
        for node in order:
            if node in unconditional and node not in on_server:
                continue
            mask = 0
            for producer in dependencies(node):
                if producer in self._masks:
                    mask |= self._masks[producer]
                elif producer in joint or behind[producer]:
                    if producer not in bits:
                        bits[producer] = 1 << len(self._nodes)
                        self._nodes.append(producer)
                    mask |= bits[producer]
            self._masks[node] = mask

    def of(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes that must run in every process before these server ops can."""
        mask = 0
        for node in nodes:
            mask |= self._masks[node]
        return [node for i, node in enumerate(self._nodes) if mask >> i & 1]


def _require_certain(pushes: Iterable[Node], unconditional: set[Node]) -> None:
    sometimes = next((push for push in pushes if push not in unconditional), None)
    if sometimes is not None:
        raise PassError(
            f"'{sometimes.name}' is computed in a branch or loop, so that a server might wait for it in vain",
            node=sometimes,
            hint="use strategy AllReduce, which exchanges it where it is",
        )


def _require_in_every_run(exports: Iterable[Value], unconditional: Collection[Node]) -> None:
    """Refuse to send a value that not every run computes: the other workers would wait for it in vain."""
    for value in exports:
        if value.node not in unconditional or value.node.op in SWITCHES:
            raise PassError(
                f"every worker reads '{value.name}', which a parameter server computes in a branch or loop",
                node=value.node,
                hint="use strategy AllReduce, or give the variables of this branch synchronizer: all_reduce",
            )


def _with_branches(order: Sequence[Node]) -> set[Node]:
    """Return the server ops, with the readers of those that run conditionally."""
    unconditional = unconditional_nodes(order)
    found = {node for node in order if node.is_driven}
    for node in order:
        if node not in found and any(v.node in found and v.node not in unconditional for v in node.inputs):
            if node.span == EACH:
                raise PassError(
                    f"'{node.name}' runs on every replica, in a loop or branch that needs what all replicas hold",
                    node=node,
                    hint="use strategy AllReduce: parameter servers exchange values outside of loops and branches",
                )
            if is_update(node):
                raise PassError(
                    f"'{node.name}' updates what every worker has, and only if a parameter server decides so",
                    node=node,
                    hint="give the variables that are updated in this branch synchronizer: all_reduce",
                )
            found.add(node)
    return found


def _read_before_pushing(rewrite: Rewrite) -> None:
    """Let this process read a variable before it contributes to the next value.

    A variable without pushes may be updated from sums that all workers have: these are contributions, too. A sum that
    can run without the updates that a read follows, as for a loss that is fetched alone, does not wait for the read.

    Raises:
        PassError: a read follows the contribution, so that it may find the next value.
    """
    graph, pushed = rewrite.graph, rewrite.homes.pushes
    order = topological_order(graph)
    roots = [*rewrite.targets, *(value.node for value in rewrite.outputs)]
    step, unconditional = ancestors(roots), unconditional_nodes(order)
    pushes = [push for push in _pushes(rewrite) if push in step]
    sums = [node for node in order if is_collective(node.op) and node in step and node in unconditional]
    if not pushes and not sums:
        return
    runs = Runs(order, roots, [*pushes, *sums])
    behind = marks_before(order, dict.fromkeys([*sums, *pushes], 1))
    levels = _levels(order, set(pushes))
    for name, variable in rewrite.item.variables.items():
        handle = graph.nodes.get(variable.handle)
        if name not in rewrite.homes.of or handle is None:
            continue
        own = [push for push in pushed.get(name, pushes) if push in step]
        updates = [node for node, _ in handle_uses(handle) if node in step and is_update(node)]
        for read in _reads(handle):
            if read.is_driven or read not in step or read not in unconditional:
                continue  # a push waits for the results of a branch or loop, not for the reads in it
            if levels[read] and not any(runs.is_before(update, read) for update in updates):
                awaited = [push for push in pushes if any(runs.is_before(push, update) for update in updates)]
                levels[read] = _early_enough(read, awaited, levels)
            for push in own:
                if levels[read] <= levels[push] and runs.may_wait(push, read):
                    push.add_control(read)
            if name not in pushed and not behind[read]:
                for node in filter(lambda node: runs.may_wait(node, read), sums):
                    node.add_control(read)


def _early_enough(read: Node, awaited: Sequence[Node], levels: Mapping[Node, int]) -> int:
    """Return the level of a read, which must be before one of the pushes that the update of its variable waits for.

    Control edges that delay it beyond that, as from the program's order of statements, are removed.
    """
    latest = max((levels[push] for push in awaited), default=levels[read])
    if levels[read] <= latest:
        return levels[read]
    for control in list(read.controls):
        if levels[control] > latest and is_pure(control.op):
            read.remove_control(control)
    level = max((levels[one] for one in dependencies(read)), default=0)
    if level > latest:
        raise PassError(
            f"'{read.name}' reads a variable after all that this worker adds to its update, which may be done by then",
            node=read,
            hint="read the variable earlier in the step, or use strategy AllReduce",
        )
    return level


def _levels(order: Iterable[Node], pushes: set[Node]) -> dict[Node, int]:
    """Return the length of the longest chain of pushes before each node.

    All nodes of a level can run before its pushes, so pushes that wait for reads of their level close no cycle.
    """
    levels: dict[Node, int] = {}
    for node in order:
        levels[node] = max((levels[one] + (one in pushes) for one in dependencies(node) if one in levels), default=0)
    return levels


def _pushes(rewrite: Rewrite) -> list[Node]:
    """Return the nodes that push this process's contributions."""
    return [push for several in rewrite.homes.pushes.values() for push in several]


def _reads(handle: Node) -> list[Node]:
    return [node for node, _ in handle_uses(handle) if not has(node.op, "forwards_handle") and not is_update(node)]


def _forget(rewrite: Rewrite, on_server: set[Node]) -> None:
    """Remove the server ops; NoOps take the names of those that callers run, such as initialisers."""
    graph, item = rewrite.graph, rewrite.item
    known = {*item.keep, *(variable.initializer for variable in item.variables.values())}
    for node in [node for node in graph if node in on_server and node.name in known]:
        name = node.name
        take_name(graph, node, graph.unique_name(name + SUFFIX))
        Builder(graph, name, name).node("NoOp")


# Branches of workers in which server ops run: let readers wait for these, and keep other nodes in their branch.
#
#     worker 0   update @ ps ──^──► constant ──► Merge          what the branch ends with waits for the update
#     worker 1   Switch:1    ──^──► constant ──► Merge          it has no update, and must not be alive in both branches
#
# A server op in a branch sends nothing by itself, as it may not run: where branches meet, one token says that it has
# run, or never will. If only the server knows which branch is taken, worker 0 sends the predicate, too.


_NONE: Guards = frozenset()


class Branches:
    """The branches and loops of one worker's graph, before server ops leave it.

    Args:
        graph: of all replicas and the servers.
        order: its nodes, producers first.
        on_server: the nodes that worker 0 runs.

    Attributes:
        unconditional: the nodes that run in every step, once.

    Raises:
        PassError: only a branch or loop of the server decides whether a node of this worker runs.
    """

    def __init__(self, graph: Graph, order: Sequence[Node], on_server: set[Node]) -> None:
        self._graph, self._order, self._on_server = graph, order, on_server
        self._frames = frames_of(order)
        self._guards = guards_of(order, self._frames)
        self.unconditional = {node for node in order if node not in self._frames and node not in self._guards}
        self._lost = self._find_lost()
        self._switches: dict[tuple[Guard, Guards], Node | None] = {}
        for node, lost in self._lost.items():
            for guard in lost:
                self._switches[guard, self._guards[node]] = self._switch_of(node, guard)
        self._pivots: dict[tuple[Guard, Guards], Node] = {}

    def _find_lost(self) -> dict[Node, Guards]:
        """Return the guards that nodes of the worker have only because they wait for server ops.

        Nodes that lead to no node that the worker runs in every step are skipped.
        """
        matters: set[Node] = set()
        for node in reversed(self._order):
            if node not in self._on_server and (node in self.unconditional or not matters.isdisjoint(users(node))):
                matters.add(node)
        found: dict[Node, Guards] = {}
        for node in self._order:
            controls = [control for control in node.controls if control not in self._on_server]
            if node not in matters or node.op in MERGES or len(controls) == len(node.controls):
                continue
            alive = [opened(value, self._frames, self._guards.get(value.node, _NONE)) for value in node.inputs]
            kept = _NONE.union(*alive, *(self._guards.get(control, _NONE) for control in controls))
            lost = self._guards.get(node, _NONE) - kept
            if lost:
                found[node] = lost
        return found

    def _switch_of(self, node: Node, guard: Guard) -> Node | None:
        """Return a Switch of the worker for a guard of a node; None if the predicate is in no branch."""
        wanted = self._guards.get(node, _NONE)
        local = (node for node in self._order if node.op in SWITCHES and node not in self._on_server)
        for switch in local:
            opens = opened(switch.output(guard.taken), self._frames, _NONE)
            if guard in opens and self._guards.get(switch, _NONE) <= wanted:
                return switch
        if guard.predicate.node in self.unconditional:
            return None
        raise PassError(
            f"'{node.name}' runs on every worker, in a branch inside of another that only a parameter server knows of",
            node=node,
            hint="give the variables that are updated in this branch synchronizer: all_reduce",
        )

    def predicates(self) -> list[Value]:
        """Return the values on servers that decide which nodes the worker runs."""
        needed = dict.fromkeys(guard.predicate for (guard, _), switch in self._switches.items() if switch is None)
        return [value for value in needed if value.node in self._on_server]

    def joined(self) -> dict[Node, list[Node]]:
        """Return the nodes of workers in which branches meet, with the last server ops that the branches wait for."""
        behind: dict[Node, dict[Node, None]] = {}
        found: dict[Node, list[Node]] = {}
        for node in self._order:
            if node in self._on_server:
                continue
            awaited: dict[Node, None] = {}
            for producer in dependencies(node):
                if producer in self._on_server:
                    awaited |= {} if producer in self.unconditional else {producer: None}
                else:
                    awaited |= behind.get(producer, {})
            if awaited and node not in self.unconditional:
                behind[node] = awaited
            elif awaited and node.op in MERGES:
                found[node] = list(awaited)
        return found

    def leave_out(self, node: Node, awaited: Sequence[Node], handed: Mapping[Value, Value]) -> None:
        """Let a node in a branch no longer wait for server ops, and run in no other branch.

        Args:
            handed: the values that the worker reads instead of those on servers.
        """
        for control in awaited:
            node.remove_control(control)
        for guard in sorted(self._lost.get(node, _NONE), key=lambda guard: (len(guard.frame), guard.predicate.name)):
            key = guard, self._guards[node]
            if key not in self._pivots:
                self._pivots[key] = self._pivot(guard, handed.get(guard.predicate, guard.predicate), node)
            node.add_control(self._pivots[key])

    def _pivot(self, guard: Guard, predicate: Value, node: Node) -> Node:
        """Return a node of the worker that runs only if a guard holds."""
        name = f"{node.name}/{'taken' if guard.taken else 'else'}"
        switch = self._switches[guard, self._guards[node]]
        where = switch or node
        if switch is None:
            switch = Builder(
                self._graph, self._graph.unique_name(f"{name}/switch"), where, span=where.span, device=where.device
            ).node("Switch", predicate, predicate)
        return Builder(self._graph, self._graph.unique_name(name), where, span=where.span, device=where.device).node(
            "Identity", switch.output(guard.taken)
        )


def _serve(rewrite: Rewrite) -> None:
    """Name and lock the nodes on parameter servers, and add local copies of variables that are read there."""
    if rewrite.plan.is_asynchronous:  # simultaneous updates of several workers run one after another
        for node in rewrite.graph:
            if node.is_driven and is_update(node) and node.attr("use_locking") is not None:
                node.set_attr("use_locking", True)
    _name_server_roots(rewrite)
    _cache_reads(rewrite)


def _has_servers(rewrite: Rewrite) -> bool:
    return any(node.is_driven for node in rewrite.graph)


PARAMETER_SERVERS = Pass("parameter-servers", _serve, _has_servers, (Homes,))
DELEGATE_TO_CHIEF = Pass(
    "delegate-to-chief", _delegate, lambda rewrite: rewrite.workers > 1 and _has_servers(rewrite), (Homes,)
)


# Cache a server variable in a process that reads it, refreshed once per step.
#
#     before  w @ ps ──► ReadVariableOp ──► MatMul       ResourceApply(w) ──^──► train
#     after   w/proxy ──► ReadVariableOp ──► MatMul      ResourceApply(w) ──^──► read w ──► assign w/proxy ──^──► train
#
# Nodes that wait for a write of the variable, also by an initialiser or a restored checkpoint, also wait for its copy.
# With `lookups`, a table of which only rows are read, outside of loops and branches, has no copy: to copy all of it in
# each step takes longer than to look up these rows on the server. With `lookups` and without `proxy`, as for shards of
# other workers, all reads run on the server.


def _cache_reads(rewrite: Rewrite) -> None:
    """Add the copies that the plan asks for, of variables that this process reads."""
    servers = {request.name: request.server for request in rewrite.plan.variables if request.server is not None}
    asked = [name for name, server in servers.items() if server.proxy or server.lookups]
    copied = {name for name in asked if servers[name].proxy}
    looked_up = {name for name in asked if servers[name].lookups}
    if asked and len(asked) == len(servers):
        asked = list(rewrite.homes.of)  # also slots and others that live with the variables
        (copied or looked_up).update(set(asked) - servers.keys())
    unconditional = unconditional_nodes(topological_order(rewrite.graph)) if looked_up else set()
    proxies: dict[str, Node] = {}
    for name in asked:
        variable = rewrite.item.variables[name]
        handle = rewrite.graph.nodes.get(variable.handle)
        uses = list(_local_uses(handle)) if handle is not None and name in rewrite.homes.of else []
        if not uses or handle is None:
            continue
        readers = [node for node, _ in uses]
        if name not in copied or (
            name in looked_up and all(has(node.op, "reads_rows") and node in unconditional for node in readers)
        ):
            if rewrite.workers > 1:
                await_writes(rewrite, variable.handle, rewrite.homes.of[name], readers)
        else:
            proxies[name] = _proxy(rewrite, variable, handle)
            for node, index in uses:
                node.set_input(index, proxies[name].output())
                _bring_home(node)
    if proxies:
        _refresh(rewrite, proxies)


def _local_uses(handle: Node) -> Iterator[Use]:
    """Yield the uses of the variable other than for its update."""
    for use in handle.output().uses:
        if not is_update(use.node) and not _leads_to_update(use.node):
            yield use


def _leads_to_update(node: Node) -> bool:
    """Return whether a node updates a variable, or hands its handle on to an update."""
    if node.is_driven or is_update(node):
        return True
    reached = (use.node for use in handle_uses(node)) if has(node.op, "forwards_handle") else ()
    return any(other.is_driven or is_update(other) for other in reached)


def _bring_home(node: Node) -> None:
    """Let a reader run on the device of its replica."""
    reached = [use.node for use in handle_uses(node)] if has(node.op, "forwards_handle") else []
    for other in (node, *reached):
        other.leave(SERVER)


def _proxy(rewrite: Rewrite, variable: Variable, handle: Node) -> Node:
    attrs = {"dtype": dtypes.NUMBERS[variable.dtype], "shape": variable.shape, "container": ""}
    name = proxy_of(variable.handle)
    return rewrite.add("VarHandleOp", (), Site(name, ONCE, handle), attrs=attrs | {"shared_name": name})


def _refresh(rewrite: Rewrite, proxies: dict[str, Node]) -> None:
    """Refresh copies after writes of their variables; nodes that wait for a write wait for the copy, too."""
    order, variables = topological_order(rewrite.graph), rewrite.item.variables
    unconditional = unconditional_nodes(order)
    handles = {rewrite.graph.nodes[variables[name].handle]: name for name in proxies}
    names = list(proxies)
    written: dict[str, int] = dict.fromkeys(names, 0)  # the bits of a variable's writes
    masks: dict[Node, int] = {}
    count = 0
    for node in order:
        if not node.is_driven and node in unconditional:
            continue
        mask = 0  # nodes after a write in a branch have its bit, too
        for producer in dependencies(node):
            mask |= masks.get(producer, 0)
        name = handles.get(handle_node(node.inputs[0])) if node.is_driven and is_update(node) else None
        if name is not None:
            mask |= 1 << count
            written[name] |= 1 << count
            count += 1
        masks[node] = mask
    made: dict[tuple[str, int], tuple[Node, int]] = {}  # the copy, and all writes that it waits for
    for node in order:
        is_local = node in unconditional and not node.is_driven
        awaited = [producer for producer in _awaited(node) if masks.get(producer)] if is_local else []
        mask = 0
        for control in awaited:
            mask |= masks[control]
        changed = [(name, mask & written[name]) for name in names if mask & written[name]]
        if not changed:
            continue
        new = [key for key in changed if key not in made or made[key][1] & ~mask]  # must await no more than the node
        in_branches = any(control not in unconditional for control in awaited)
        readers = users(node) if in_branches else (node,)
        if new:
            done = node if in_branches else _gathered(node, awaited)
            made |= {key: (_copied(rewrite, variables[key[0]], proxies[key[0]], done), mask) for key in new}
        for key in changed:
            for reader in readers:
                reader.add_control(made[key][0])


def _awaited(node: Node) -> list[Node]:
    """Return the nodes that a node waits for: its controls and, where branches meet, its inputs on this worker."""
    ends = (value.node for value in node.inputs if not value.node.is_driven)
    return list(dict.fromkeys((*node.controls, *(ends if node.op in MERGES else ()))))


def _gathered(node: Node, awaited: Sequence[Node]) -> Node:
    """Let a new node wait in the place of `node`, and `node` wait for it; return the new node."""
    done = Builder.at(node).node("NoOp", what="written", controls=awaited)
    for control in awaited:
        node.remove_control(control)
    node.add_control(done)
    return done


def _copied(rewrite: Rewrite, variable: Variable, proxy: Node, done: Node) -> Node:
    handle = rewrite.graph.nodes[variable.handle]
    home = ServerBuilder(rewrite, rewrite.homes.of[variable.name], handle, variable.handle)
    dtype = dtypes.NUMBERS[variable.dtype]
    value = home.add("ReadVariableOp", (handle.output(),), "fresh", controls=[done], dtype=dtype).output()
    inputs, name = (proxy.output(), value), f"{variable.handle}/refresh"
    return rewrite.add("AssignVariableOp", inputs, Site(name, ONCE, handle), attrs={"dtype": dtype})
