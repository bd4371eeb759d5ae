"""A rewrite in sentences: what was replicated, where and why replicas communicate, what is not divided, the costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from autograph_rewrite.diagnostics.amounts import few, several, size
from autograph_rewrite.inspect.report_view import STEP, Account, ShownEdge, account_of
from autograph_rewrite.inspect.table import ranking_text
from autograph_rewrite.ir.types.device_names import short
from autograph_rewrite.plan.codecs import shown
from autograph_rewrite.training_graph import TrainingGraph

SHOWN = 10  # entries of one list


def explain(new: TrainingGraph, *, batch: int | None = None) -> str:
    """Say in sentences what was rewritten, what is divided, what runs whole, why, and what it costs.

    Args:
        new: a rewritten item.
        batch: examples of all devices together, where the graph leaves that open.

    Raises:
        GraphError: the item was not rewritten.
    """
    return text_of(account_of(new, batch))


def text_of(account: Account) -> str:
    """Return an account in sentences."""
    parts = [
        _overview(account),
        *_devices(account),
        *_coverage(account),
        *_inexact(account),
        *_gradients(account),
        *_step(account),
        *_model(account),
        *_counted(account),
        *_local(account),
        *_whole(account),
        *_plan(account),
    ]
    if account.ranking:
        parts.append(ranking_text(account.ranking).rstrip())
    if account.passes:
        parts.append(_times(account))
    return "\n".join(parts) + "\n"


def _overview(account: Account) -> str:
    where = "one copy of each variable" if account.mode == "shared" else "a copy of each variable per replica"
    parts = f" of {account.micro} micro-batches" if account.micro > 1 else ""
    spent = f" in {account.seconds:.2f} s" if account.seconds is not None else ""
    return (
        f"The graph of {several(account.before, 'node')} became one of {several(account.after, 'node')}{spent}: "
        f"{several(account.replicas, 'replica')}{parts}, {where} ({account.mode})."
    )


def _devices(account: Account) -> Iterator[str]:
    """Say which devices a replica has, where it has several."""
    shown = account.devices[:SHOWN] if any(len(own) > 1 for own in account.devices) else ()
    for replica, own in enumerate(shown):
        yield f"  Replica {replica} has {', '.join(map(short, own))}."
    if shown and len(account.devices) > SHOWN:
        yield f"  ... and {len(account.devices) - SHOWN} more replicas"


def _coverage(account: Account) -> Iterator[str]:
    covered = account.covered
    if covered.parts == 1:
        return
    yield f"Coverage: {covered}."
    lines = covered.lines(SHOWN)
    if lines:
        yield "These ops run on whole values, once or the same on every device; so do the ops that follow from them:"
        yield from (f"  {line}" for line in lines)


def _inexact(account: Account) -> Iterator[str]:
    if not account.inexact:
        return
    yield f"{several(len(account.inexact), 'value')} not those of one device, as the configuration asks:"
    for node, op, text in account.inexact:
        yield f"  {op} '{node}': {text}"


def _gradients(account: Account) -> Iterator[str]:
    exchanged = [edge for edge in account.edges if edge.kind != "local" and edge.owner != STEP]
    if not exchanged:
        yield "No variable's gradient had to be combined."
        return
    reduced = [edge for edge in exchanged if edge.kind == "reduction"]
    counts = Counter(edge.owner for edge in reduced if not edge.role)
    more = [f"{owner} ({count})" for owner, count in counts.items() if count > 1]
    if reduced:
        yield (
            f"{several(counts.total(), 'reduction')} for {several(len(counts), 'variable')}, "
            f"{size(sum(edge.bytes for edge in reduced))} per replica and step ({_lowerings(reduced)})."
        )
    if more:
        yield f"  More than one reduction: {few(more)}."
    compressed = [
        f"{edge.owner} ({shown(edge.compressor)})" for edge in reduced if edge.compressor != "none" and not edge.role
    ]
    if compressed:
        yield f"  Compressed, so not exact: {few(compressed)}."
    gathered = [edge for edge in exchanged if edge.kind == "gather"]
    if gathered:
        owners = list(dict.fromkeys(edge.owner for edge in gathered))
        yield (
            f"{several(len(gathered), 'gather')} for {few(owners)}: sparse gradients, or rows that an update "
            f"needs whole ({_lowerings(gathered)})."
        )
    buckets = Counter(edge.bucket for edge in exchanged if edge.bucket)
    if buckets:
        yield f"  {buckets.total()} of them travel in {several(len(buckets), 'bucket')}."


def _step(account: Account) -> Iterator[str]:
    shared = [edge for edge in account.edges if edge.kind != "local" and edge.owner == STEP]
    if not shared:
        return
    yield (
        f"{several(len(shared), 'value')} combined for the step itself (losses, norms, statistics, outputs), "
        f"{size(sum(edge.bytes for edge in shared))} per replica:"
    )
    yield from _listed(sorted(shared, key=lambda edge: (-edge.bytes, edge.value)))


def _model(account: Account) -> Iterator[str]:
    """Say what the devices of a replica exchange, axis by axis, and the largest."""
    for axis, count in enumerate(account.model_axes):
        found = [edge for edge in account.model_edges if edge.axis == axis]
        name = f"axis {axis} of the model axes" if len(account.model_axes) > 1 else "the model axis"
        if found:
            yield (
                f"{several(len(found), 'value')} exchanged or cut on {name} ({count} devices each), "
                f"{size(sum(edge.bytes for edge in found))} per replica ({_lowerings(found)}):"
            )
            yield from _listed(sorted(found, key=lambda edge: (-edge.bytes, edge.value)))


def _counted(account: Account) -> Iterator[str]:
    if account.batch and any(edge.kind != "local" for edge in (*account.edges, *account.model_edges)):
        total = f"each member hands over {size(account.exchanged_bytes)} in all"
        yield f"All bytes are for a step of {account.batch:,} examples; {total}."


def _local(account: Account) -> Iterator[str]:
    local = [edge for edge in account.edges if edge.kind == "local"]
    if local:
        yield f"{several(len(local), 'value')} adapted without any exchange ({_lowerings(local)})."


def _whole(account: Account) -> Iterator[str]:
    if not account.notes:
        divided = "Every op that depends on the batch is divided, and no" if not account.covered.largest else "No"
        yield f"{divided} op runs whole because it lacks a rule."
        return
    yield f"{several(len(account.notes), 'node')} left whole, which is right but saves nothing:"
    groups: dict[tuple[str, str], list[str]] = {}
    for node, op, text in account.notes:
        groups.setdefault((op, text), []).append(node)
    for (op, text), nodes in list(groups.items())[:SHOWN]:
        yield f"  {len(nodes)} x {op} ({few(nodes, 2)}): {text}"
    if len(groups) > SHOWN:
        yield f"  ... and {len(groups) - SHOWN} more kinds"


def _plan(account: Account) -> Iterator[str]:
    if account.plan_notes:
        yield "The plan says:"
        yield from (f"  {note}" for note in account.plan_notes[:SHOWN])
    if len(account.plan_notes) > SHOWN:
        yield f"  ... and {len(account.plan_notes) - SHOWN} more"


def _times(account: Account) -> str:
    total: Counter[str] = Counter()
    for name, seconds, _, _ in account.passes:
        total[name] += seconds  # type: ignore[assignment]
    longest = sorted(total.items(), key=lambda pair: -pair[1])[:4]
    return "Most time went into " + ", ".join(f"{name} ({seconds:.2f} s)" for name, seconds in longest) + "."


def _listed(edges: Sequence[ShownEdge]) -> Iterator[str]:
    for edge in edges[:SHOWN]:
        yield f"  {edge.value}: {edge.before} -> {edge.after} by {edge.means}, {size(edge.bytes)}: {edge.reason}"
    if len(edges) > SHOWN:
        yield f"  ... and {len(edges) - SHOWN} more"


def _lowerings(edges: Iterable[ShownEdge]) -> str:
    counts = Counter(edge.means for edge in edges)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
