"""Find the policies of a configuration and of a program's variables, each with its variable, and their faults.

    variable_policies: [{match: "bn/.*", synchronization: on_read, aggregation: mean}]     bn/mean: on_read, mean
    tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)                               on_write, sum (declared)

The configuration has precedence. The refusals and their order are TensorFlow's (`tf.VariableSynchronization`,
`tf.VariableAggregation`); `auto` of TensorFlow is exact here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Override, VariablePolicy
from autograph_rewrite.diagnostics.faults import FileFault, did_you_mean
from autograph_rewrite.diagnostics.limits import matches
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.replica_marks import replica_mark
from autograph_rewrite.plan.parts.messages import Policy
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph, Variable


def policies_of(item: TrainingGraph, config: Config) -> tuple[tuple[Policy, ...], list[FileFault]]:
    """Return the policies of an item's variables, in its order, and the faults of the configured ones."""
    found: list[Policy] = []
    differs = bool(config.variable_policies) or any(replica_mark(node) for node in item.graph.nodes)
    faults = list(unmatched(item, config, "variable_policies"))
    for name, variable in item.variables.items():
        index = next((i for i, one in enumerate(config.variable_policies) if matches(one.match, name)), None)
        if index is None:
            found += _declared(name, variable) if differs else ()
            continue
        policy = _configured(name, config.variable_policies[index])
        if policy is None:
            continue
        problem = problem_of(policy, variable)
        if problem is not None:
            faults.append(config.fault(("variable_policies", index), *problem))
        found.append(policy)
    return tuple(found), faults


def described(plan: Plan, variables: Mapping[str, Variable]) -> dict[str, str]:
    """Return the policy of each variable, and its source."""
    stated = {policy.variable: policy for policy in plan.policies}
    found = {}
    for name, variable in variables.items():
        policy = stated.get(name)
        if policy is not None:
            by = "declared by the program, where replicas differ" if policy.declared else "variable_policies"
            found[name] = f"{policy.synchronization}, {policy.aggregation} ({by})"
        else:
            found[name] = "on_write, gradients are summed" if variable.trainable else "on_write, as on one device"
    return found


def unmatched(
    item: TrainingGraph, config: Config, section: Literal["variables", "variable_policies"]
) -> Iterator[FileFault]:
    """Yield the entries of a section that match no variable: misspelt, most likely."""
    entries: Sequence[Override | VariablePolicy] = getattr(config, section)
    for i, entry in enumerate(entries):
        if not any(matches(entry.match, name) for name in item.variables):
            message = f"{section}[{i}].match: no variable's whole name matches '{entry.match}'"
            hint = did_you_mean(entry.match, list(item.variables), noun="known variables")
            yield config.fault((section, i, "match"), message, hint)


def _configured(name: str, entry: VariablePolicy) -> Policy | None:
    """Return the policy of an entry; None where it is to compute as on one device."""
    when = entry.synchronization
    if when == "auto":
        when = "none" if entry.aggregation == "none" else "on_write"
    return None if when == "none" else Policy(name, when, entry.aggregation)


def _declared(name: str, variable: Variable) -> Iterator[Policy]:
    """Yield the policy that the program declares, if the variable can have it."""
    when, how = variable.synchronization or "on_write", variable.aggregation or "none"
    policy = Policy(name, when, how, declared=True)
    if how != "none" and problem_of(policy, variable) is None:
        yield policy


def problem_of(policy: Policy, variable: Variable) -> tuple[str, str] | None:
    """Return the fault of a variable's policy, and a hint; None where there is none."""
    name = policy.variable
    if policy.has_components and variable.trainable:
        return (
            f"'{name}' is trained, and a component for each replica can belong to a variable only that is not",
            "aggregate it on_write, or make it with trainable=False",
        )
    if policy.aggregation == "mean" and dtypes.NUMBERS.get(variable.dtype, 0) not in dtypes.INEXACT:
        return f"'{name}' is of type {variable.dtype}, which has no mean", "choose sum or only_first_replica"
    is_number = dtypes.NUMBERS.get(variable.dtype, 0) in dtypes.INEXACT | dtypes.INTEGER
    if not is_number and (policy.aggregation == "sum" or policy.has_components):
        return f"'{name}' is of type {variable.dtype}, which cannot be added up", "leave its policy out"
    if policy.has_components and (variable.shape is None or None in variable.shape):
        return f"the shape of '{name}' is not known, so no component can be made", "give the variable a static shape"
    return None
