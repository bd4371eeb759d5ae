"""Apply the policies of variables: each replica computes an update alone; a write or a read merges the updates.

    before          v += reduce_mean(x)                                  x: split(0)
    on_write mean   v += sum over replicas of (mean of its block / n)
    on_read sum     c += mean of its block;  v = sum over replicas of c      c: own, a component of each replica

A variable with components always holds their merged value, so all readers outside the step (savers, fetches, another
step, Python) get that. A value that is written from outside becomes the components of the next step
(`passes.compression.compressor_state`). TensorFlow has `VariableSynchronization` and `VariableAggregation` for this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autograph_rewrite.analysis.propagate import Propagation, is_pinned, revise
from autograph_rewrite.analysis.variable_uses import variable_uses
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import ancestors, descendants, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ir.types.replica_marks import ADDED, IS_FIRST, PART, replica_mark
from autograph_rewrite.ir.variable_ops import handle_node, is_update, updates_rows
from autograph_rewrite.ops.rules.base import OWN_VALUE
from autograph_rewrite.ops.rules.marked import MEAN, OF_BLOCK, OF_EACH, OF_ONE, OWN, SUM, TOTAL, as_mark, kind_of, mark
from autograph_rewrite.ops.rules.table import families, family_of
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.order_accesses import access_order
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.canonicalize.varying_values import (
    is_of_batch,
    once_for_each_replica,
    only_where,
    share_of,
)
from autograph_rewrite.plan.parts.messages import Policy
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import Variable

ADDS = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}


@dataclass(frozen=True)
class ComponentOf:
    """A variable with components.

    Attributes:
        component: a replica's component at the beginning of a step; its operand reads the variable.
        kept: the component at the end of the step.
        update: the node that writes the merged value.
    """

    policy: Policy
    component: Node
    kept: Value
    update: Node


@dataclass(frozen=True)
class Components:
    """All variables with components; and the updates that differ from those on one device, each with its policy."""

    variables: tuple[ComponentOf, ...] = ()
    inexact: Mapping[Node, Policy] = field(default_factory=dict)


class _Policies:
    """Applies policies to updates.

    Args:
        state: placements before means are decomposed.
        roots: the targets and outputs of a step.
    """

    def __init__(
        self, state: Propagation, plan: Plan, variables: Mapping[str, Variable], roots: Collection[Node]
    ) -> None:
        self._roots, step = roots, ancestors(roots)
        self._state, self._plan, self._graph = state, plan, state.graph
        handles = {variable.handle: name for name, variable in variables.items()}
        self._policies = {policy.variable: policy for policy in plan.policies}
        uses = variable_uses(state, variables, step=step) if any(not p.declared for p in plan.policies) else {}
        self._exact = {name for name, use in uses.items() if use.owner is not None}
        self._exact |= {name for name, one in variables.items() if one.trainable}
        self._accesses: dict[str, list[Node]] = {}
        for node in state.order:
            name = handles.get(handle_node(node.inputs[0]).name, "") if node.inputs and _is_access(node) else ""
            if name in self._policies and node in step:
                self._accesses.setdefault(name, []).append(node)
        self._current: dict[Node, Value] = {}  # by read, the component that it sees
        self._inexact: dict[Node, Policy] = {}
        self._of_each: ReplicaContext | None = None

    def follow(self) -> tuple[Propagation, Components]:
        """Edit the graph; return the revised placements, and the variables with components.

        Raises:
            GraphError: a policy does not fit an update or a read.
        """
        state = self._state
        with_components = [name for name, accesses in self._accesses.items() if self._has_components(name, accesses)]
        starts = {name: self._component(name, self._accesses[name]) for name in with_components}
        self._of_each = ReplicaContext(state, self._current)
        after_reads = self._split_readers()
        found = []
        for name, accesses in self._accesses.items():
            updates = [node for node in accesses if is_update(node)]
            if name in starts:
                found.append(self._keep(self._policies[name], starts[name], updates))
            else:
                for update in updates:
                    self._merge_on_write(self._policies[name], update, exact=name in self._exact)
        for node in after_reads:
            for index, value in enumerate(node.inputs):
                node.set_input(index, self._of_each.of(value))
        self._require_unread(starts)
        return revise(state), Components(tuple(found), self._inexact)

    def _require_unread(self, starts: Collection[str]) -> None:
        """Refuse reads of a variable whose components are not merged into one value."""
        names = [name for name in starts if self._policies[name].is_unreadable]
        alive = ancestors(self._roots) if names else set()
        for name in names:
            for read in [node for node in self._accesses[name] if node in self._current]:
                if not any(use.node in alive for use in read.output().uses):
                    continue  # only control edges need the read: its readers read the component
                raise GraphError(
                    f"'{read.name}' reads '{name}' for all replicas, whose components nothing makes one value of",
                    node=read,
                    hint="give its policy an aggregation: sum, mean or only_first_replica",
                )

    def _has_components(self, name: str, accesses: list[Node]) -> bool:
        """Return whether a variable gets components: under a declared policy, if an update writes a varying value."""
        if not self._policies[name].has_components or name in self._exact:
            return False
        updates = [node for node in accesses if is_update(node)]
        if self._policies[name].declared:
            return any(self._state.facts[v].placement == OWN_VALUE for node in updates for v in node.inputs[1:])
        return bool(updates)

    # -- components

    def _component(self, name: str, accesses: list[Node]) -> Node:
        """Add the component of a variable at the beginning of a step, and let each read see it."""
        self._require_plain(name, accesses)
        first = next(node for node in accesses if is_update(node))
        dtype = next(node.attr("dtype") for node in accesses if has(node.op, "reads_whole", "assigns_dense"))
        read = Builder(self._graph, f"{name}/component/total", first).node(
            "ReadVariableOp",
            first.inputs[0],
            controls=first.controls if not any(is_update(c) for c in first.controls) else (),
            dtype=dtype,
        )
        marks = as_mark(OF_EACH, PART)
        component = Builder(self._graph, f"{name}/component", first).node("Identity", read.output(), marks=marks)
        self._current |= {node: component.output() for node in accesses if has(node.op, "reads_whole")}
        return component

    def _require_plain(self, name: str, accesses: list[Node]) -> None:
        certain = unconditional_nodes(self._state.order)
        for node in accesses:
            if is_update(node) and not has(node.op, "assigns_dense"):
                raise GraphError(
                    f"{node.op} '{node.name}' cannot update '{name}', of which each replica has a component",
                    node=node,
                    hint="update it with assign, assign_add or assign_sub, or aggregate it on_write",
                )
            if node in self._state.looped or (is_update(node) and node not in certain):
                raise GraphError(
                    f"'{node.name}' is in a loop or a branch, and '{name}' has a component for each replica",
                    node=node,
                    hint="update it outside, or aggregate it on_write",
                )

    def _keep(self, policy: Policy, component: Node, updates: list[Node]) -> ComponentOf:
        """Let each update change the components, and write their merged value to the variable."""
        current = component.output()
        for update in [node for node in topological_order(self._graph) if node in set(updates)]:
            current = self._changed(current, update)
            total = self._merged(policy, current, update)
            become(update, "AssignVariableOp", [update.inputs[0], total], {"dtype": total.dtype})
            self._see(update, current)
            self._inexact[update] = policy
        return ComponentOf(policy, component, current, updates[-1])

    def _changed(self, current: Value, update: Node) -> Value:
        """Return the component after an update."""
        build = Builder.at(update)
        assert self._of_each is not None
        value = self._of_each.of(update.inputs[1])
        if update.op in ADDS:
            value = build.op(ADDS[update.op], current, value, what="component")
        value = self._own(value, update)
        if not is_of_batch(self._state, value) or (self._state.semantics.extent.units or 0) >= self._plan.instances:
            return value
        filled = self._has_examples(update)
        return build.op("SelectV2", filled, value, current, what="if_any")

    def _has_examples(self, update: Node) -> Value:
        """Return whether a replica's block has examples: a value that is computed from none does not count."""
        (source, axis), build = next(iter(self._state.whole_inputs.items())), Builder.at(update, "has_examples")
        shape = build.op("Shape", source, what="shape", out_type=dtypes.INT32)
        limits = {"begin": [axis], "end": [axis + 1], "step": [1]}
        inputs = [build.const(at, dtypes.INT32, what) for what, at in limits.items()]
        rows = build.op("StridedSlice", shape, *inputs, what="rows", shrink_axis_mask=1)
        none = build.const(0, dtypes.INT32, "none")
        return build.op("Greater", rows, none, marks=as_mark(OF_BLOCK, OF_ONE))

    def _see(self, update: Node, current: Value) -> None:
        """Let reads after an update see the updated component."""
        handle = handle_node(update.inputs[0])
        for read in [node for node in self._current if handle_node(node.inputs[0]) is handle]:
            if update in ancestors([read]):
                self._current[read] = current

    def _split_readers(self) -> list[Node]:
        """Return the nodes that read components: they use the variable for examples, or add it up over the replicas."""
        reached, found, pending = set(self._current), [], list(self._current)
        while pending:
            for use in [use for value in pending.pop().read_outputs for use in value.uses]:
                user = use.node
                if user in reached or user not in self._state.transfers:
                    continue
                reached.add(user)
                split = any(fact.placement.is_split for fact in self._state.transfers[user].outputs)
                if split or replica_mark(user.name) in ADDED:
                    found.append(user)
                else:
                    pending.append(user)
        return found

    # -- merging

    def _merge_on_write(self, policy: Policy, update: Node, *, exact: bool) -> None:
        """Let an update write the merged value of all replicas."""
        assert self._of_each is not None
        for index, value in enumerate(update.inputs):
            if not index or dtypes.base(value.dtype) == dtypes.RESOURCE:
                continue
            fact = self._state.facts[value]
            is_alike = policy.declared or exact or not (has(update.op, "assigns_dense") or updates_rows(update))
            if is_alike and fact.placement != OWN_VALUE:
                continue
            if updates_rows(update):
                self._require_scatter(policy, update)
            own = value if is_alike else self._of_each.of(value)
            if own is value and fact.placement != OWN_VALUE:
                if policy.aggregation != "sum":
                    continue
                own = self._own(value, update)
            update.set_input(index, self._merged(policy, own, update))
            self._inexact[update] = policy

    def _require_scatter(self, policy: Policy, update: Node) -> None:
        if has(update.op, "scatters_one_of") and policy.aggregation == "only_first_replica":
            return
        raise GraphError(
            f"{update.op} '{update.name}' would write rows that differ between replicas into '{policy.variable}'",
            node=update,
            hint="update it with assign, assign_add or assign_sub, or merge the rows with ar.all_gather",
        )

    def _own(self, value: Value, update: Node) -> Value:
        """Mark a value as varying, even if it is the same on all replicas."""
        return Builder.at(update).op("Identity", value, what="of_each", marks=as_mark(OF_EACH, PART))

    def _merged(self, policy: Policy, value: Value, update: Node) -> Value:
        """Return a varying value merged over the replicas, as the policy says."""
        graph, kind, plan = self._graph, policy.aggregation, self._plan
        name = f"{update.name}/{kind}"
        of_batch = is_of_batch(self._state, value) and not policy.has_components
        value = once_for_each_replica(self._state, value, plan)
        if kind == "mean":
            count = plan.instances if of_batch else plan.replicas
            exit_, how = share_of(value, count, name), MEAN if of_batch else TOTAL
        else:
            value = value if kind == "sum" else only_where(value, IS_FIRST)
            exit_, how = Builder(graph, name, update).node("Identity", value), SUM if of_batch else TOTAL
        mark(exit_, OF_BLOCK, how)
        return exit_.output()


def _is_access(node: Node) -> bool:
    return has(node.op, "reads_whole") or is_update(node)


# Compute a value on each replica alone, as if its block were the whole batch: copy the nodes that mix examples.
#
#     before   m = Mean(x)   v = Mean((x - m)^2)        x: split(0); m and v of the whole batch
#     after    m' = Mean(x)  v' = Mean((x - m')^2)      of the block: own
#
# The nodes before the mixed values (convolutions, products: all that are not elementwise) stay those of the exact step.
# A variable with components is read as the replica's component.


_ELEMENTWISE = families("elementwise", "ensure_shape")


class ReplicaContext:
    """Makes these copies, each once.

    Args:
        state: placements before means are decomposed; its graph is edited.
        components: by read of a variable with components, the component that it sees; the caller may change it.
    """

    def __init__(self, state: Propagation, components: Mapping[Node, Value]) -> None:
        self._state, self._components = state, components
        self._fed = {value.node for value in state.whole_inputs}
        sources = self._fed | components.keys()
        sources |= {node for node in state.order if kind_of(node) == OF_EACH}
        self._moving = descendants(sources, controls=False) | sources
        self._copied: dict[Node, bool] = {}
        self._copies: dict[Node, Node] = {}

    def of(self, value: Value) -> Value:
        """Return a value as each replica computes it alone; a value that does not mix examples is returned as it is.

        Raises:
            GraphError: a node to copy is in a branch or a loop, or can only run once.
        """
        for node in self._in_order(value.node):
            self._copied[node] = self._is_copied(node)
            if self._copied[node]:
                self._copy(node)
        return self._replaced(value)

    def _in_order(self, start: Node) -> list[Node]:
        """Return the undecided nodes on which a node depends, and itself, producers first."""
        order: list[Node] = []
        seen: set[Node] = set()
        stack = [(start, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen and node not in self._copied:
                seen.add(node)
                stack.append((node, True))
                is_open = node in self._moving and not self._ends(node)
                stack += [(value.node, False) for value in node.inputs if is_open]
        return order

    def _ends(self, node: Node) -> bool:
        """Return whether a node's outputs are used as they are, so that its producers do not matter."""
        is_elementwise = has(node.op, "forwards") or family_of(node.op) in _ELEMENTWISE
        if node in self._components or kind_of(node) == OF_EACH or (self._is_split(node) and not is_elementwise):
            return True
        facts = [self._state.facts[node.output(i)] for i in range(len(self._state.transfers[node].outputs))]
        return not facts or any(fact.is_local for fact in facts) or node in self._fed

    def _is_split(self, node: Node) -> bool:
        return any(fact.placement.is_split for fact in self._state.transfers[node].outputs)

    def _is_copied(self, node: Node) -> bool:
        if node not in self._moving or self._ends(node):
            return False
        mixes = not self._is_split(node) and any(self._state.facts[v].placement.differs for v in node.inputs)
        if not (mixes or any(self._is_replaced(value) for value in node.inputs)):
            return False
        rule_pins = is_pinned(node) or not is_pure(node.op)
        if has(node.op, "routes") or rule_pins or any(_is_handle(v) for v in (*node.inputs, *node.outputs)):
            raise GraphError(
                f"'{node.name}' ({node.op}) runs once for all replicas, and a policy asks for the value of each",
                node=node,
                hint="compute what the variable is updated with outside of branches and loops, or leave it out",
            )
        return True

    def _is_replaced(self, value: Value) -> bool:
        return value.node in self._components or self._copied.get(value.node, False)

    def _replaced(self, value: Value) -> Value:
        if value.node in self._components:
            return self._components[value.node]
        copy = self._copies.get(value.node)
        return value if copy is None else copy.output(value.index)

    def _copy(self, node: Node) -> None:
        copy = copy_node(
            self._state.graph, node, [self._replaced(v) for v in node.inputs], name=f"{node.name}/of_replica"
        )
        mark(copy, OF_BLOCK, OWN if self._is_split(node) else OF_ONE)
        self._copies[node] = copy


def _is_handle(value: Value) -> bool:
    return dtypes.base(value.dtype) in (dtypes.RESOURCE, dtypes.VARIANT)


def _follow(rewrite: Rewrite) -> None:
    """Apply policies to updates of variables: merge them when they are written, or keep a component on each replica."""
    item = rewrite.item
    step = [*rewrite.targets, *(value.node for value in rewrite.outputs)]
    state, found = _Policies(rewrite.state, rewrite.plan, item.variables, step).follow()
    eliminate_dead_code(rewrite.graph, rewrite.roots)
    rewrite.put(access_order(rewrite.graph, rewrite.targets))
    rewrite.put(revise(state))
    rewrite.put(found)


VARIABLE_POLICIES = Pass(
    "variable-policies", _follow, lambda rewrite: bool(rewrite.plan.policies), (Propagation,), (Propagation, Components)
)
