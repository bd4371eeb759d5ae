"""Explain a rewrite in sentences: what was replicated, why replicas communicate, what runs whole, and the cost."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from autograph_rewrite.cost.tasks.layers import COLUMNS, cells
from autograph_rewrite.cost.tasks.result import DeviceUse, Simulation
from autograph_rewrite.diagnostics.amounts import few, several, size
from autograph_rewrite.inspect.report_view import STEP, Account, ShownEdge, account_of
from autograph_rewrite.inspect.table import drawn, fitted, ranking_text, table
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.types.device_names import short
from autograph_rewrite.plan.codecs import shown
from autograph_rewrite.training_graph import TrainingGraph

SHOWN = 10  # entries of one list


def explain(new: TrainingGraph, *, batch: int | None = None) -> str:
    """Explain a rewrite in sentences: what was rewritten, what is divided, what runs whole, why, and what it costs.

    Args:
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
        *_held(account),
        *_blocks(account),
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
    if account.report.passes:
        parts.append(_times(account))
    return "\n".join(parts) + "\n"


def _overview(account: Account) -> str:
    report, plan = account.report, account.plan
    where = "one copy of each variable" if plan.mode == "shared" else "a copy of each variable per replica"
    if any(edge.joins_shards for edge in account.edges):
        where += " that is not split over them"
    parts = f" of {plan.microbatches} micro-batches" if plan.microbatches > 1 else ""
    return (
        f"The graph of {several(report.nodes_before, 'node')} became one of {several(report.nodes_after, 'node')} in "
        f"{report.seconds:.2f} s: {several(plan.replicas, 'replica')}{parts}, {where} ({plan.mode})."
    )


def _devices(account: Account) -> Iterator[str]:
    """Yield the devices of each replica, if it has several."""
    if any(len(own) > 1 for own in account.devices):
        named = [f"Replica {replica} has {', '.join(map(short, own))}." for replica, own in enumerate(account.devices)]
        yield from _first(named, " replicas")


def _held(account: Account) -> Iterator[str]:
    """Yield the bytes of variables on each device, and the layers of each where the model is cut into stages."""
    held, whole = account.report.held, account.whole_bytes
    if len(held) > 1:
        least, most = min(held.values()), max(held.values())
        of_all = ", as one device alone" if least == whole else f", of {size(whole)} in all"
        each = f"Each device holds {size(most)}"
        said = each if most <= 1.01 * least else f"Devices hold {size(least)} to {size(most)}"
        yield f"{said} of variables and optimizer state{of_all}."
    for device, layers in account.layers.items():
        computed = f"computes {few(layers)}" if layers else "computes no layer with variables"
        yield f"  {short(device)} {computed}" + (f"; it holds {size(held[device])}." if device in held else ".")


def _blocks(account: Account) -> Iterator[str]:
    """Yield the variables that the model axes cut; those that are cut alike together."""
    if not account.blocks:
        return
    yield f"{several(len(account.blocks), 'variable')} in blocks on the model axis, with their optimizer state:"
    alike = grouped((how, name) for name, how in account.blocks.items())
    yield from _first([f"{few(names)}: {how}" for how, names in alike.items()], " kinds")


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
    inexact = account.report.inexact
    if not inexact:
        return
    yield f"{several(len(inexact), 'value')} not those of one device, as the configuration asks:"
    yield from (f"  {note.op} '{note.node}': {note.text}" for note in inexact)


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
    wholes = [edge for edge in exchanged if edge.joins_shards]
    if wholes:
        owners = list(dict.fromkeys(edge.owner for edge in wholes))
        yield (
            f"{several(len(owners), 'variable')} split over the replicas, of which a step takes "
            f"{several(len(wholes), 'gather')}, {size(sum(edge.bytes for edge in wholes))} per replica "
            f"({_lowerings(wholes)}): {few(owners)}."
        )
    gathered = [edge for edge in exchanged if edge.kind == "gather" and not edge.joins_shards]
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
    yield from _listed(shared)


def _model(account: Account) -> Iterator[str]:
    """Yield what the devices of a replica exchange on each axis, with the largest exchanges."""
    axes = account.plan.model.axes if account.plan.model is not None else ()
    for axis, count in enumerate(axes):
        found = [edge for edge in account.model_edges if edge.axis == axis]
        name = f"axis {axis} of the model axes" if len(axes) > 1 else "the model axis"
        if found:
            yield (
                f"{several(len(found), 'value')} exchanged or cut on {name} ({count} devices each), "
                f"{size(sum(edge.bytes for edge in found))} per replica ({_lowerings(found)}):"
            )
            yield from _listed(found)


def _counted(account: Account) -> Iterator[str]:
    if account.batch and any(edge.kind != "local" for edge in (*account.edges, *account.model_edges)):
        total = f"each member hands over {size(account.exchanged_bytes)} in all"
        yield f"All bytes are for a step of {account.batch:,} examples; {total}."


def _local(account: Account) -> Iterator[str]:
    local = [edge for edge in account.edges if edge.kind == "local"]
    if local:
        yield f"{several(len(local), 'value')} adapted without any exchange ({_lowerings(local)})."


def _whole(account: Account) -> Iterator[str]:
    notes = account.report.notes
    if not notes:
        divided = "Every op that depends on the batch is divided, and no" if not account.covered.largest else "No"
        yield f"{divided} op runs whole because it lacks a rule."
        return
    yield f"{several(len(notes), 'node')} left whole, which is right but saves nothing:"
    groups = grouped(((note.op, note.text), note.node) for note in notes)
    kinds = [f"{len(nodes)} x {op} ({few(nodes, 2)}): {text}" for (op, text), nodes in groups.items()]
    yield from _first(kinds, " kinds")


def _plan(account: Account) -> Iterator[str]:
    if account.plan_notes:
        yield "The plan says:"
        yield from _first(account.plan_notes)


def _times(account: Account) -> str:
    total: Counter[str] = Counter()
    for one in account.report.passes:
        total[one.name] += one.seconds  # type: ignore[assignment]
    longest = sorted(total.items(), key=lambda pair: -pair[1])[:4]
    return "Most time went into " + ", ".join(f"{name} ({seconds:.2f} s)" for name, seconds in longest) + "."


def _listed(edges: Sequence[ShownEdge]) -> Iterator[str]:
    """Yield a line for each of the largest edges."""
    ordered = sorted(edges, key=lambda edge: (-edge.bytes, edge.value))
    yield from _first(
        [f"{one.value}: {one.from_} -> {one.to} by {one.means}, {size(one.bytes)}: {one.reason}" for one in ordered]
    )


def _first(lines: Sequence[str], noun: str = "") -> Iterator[str]:
    """Yield the first lines, and how many more there are."""
    yield from (f"  {line}" for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"  ... and {len(lines) - SHOWN} more{noun}"


def _lowerings(edges: Iterable[ShownEdge]) -> str:
    counts = Counter(edge.means for edge in edges)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


# A predicted step as text and pictures: levers, layers, and memory over time.


def where_time_goes(found: Simulation, levers: Iterable[str]) -> str:
    """Return the sentences of the levers and a table of layers."""
    first = f"Where the time goes: {str(found).partition(chr(10))[0]} (predicted)."
    layers = found.layers()
    rows = drawn(table("dearest layers, with their gradients", COLUMNS, map(cells, layers))) if layers else ""
    return "\n".join((fitted("\n".join((first, *(f"  {text}" for text in levers)))), rows))


# Memory of each device over a step, with and without recomputation, as a picture and as plain data.
#
# to_svg({"before": ar.simulate(item, plan without remat), "after": ar.simulate(item, plan)})

WIDTH, HEIGHT, TEXT = 560, 180, 14
HOLDERS = 8
"""The most holders of memory at the peak that a picture names."""
COLORS = {"before": "#9aa5b1", "after": "#1f6feb"}


def data(steps: Mapping[str, Simulation]) -> dict[str, Any]:
    """Return the bytes over time of each device, and their holders at the peak, as plain data.

    Args:
        steps: simulated with their events, by name: before, after.
    """
    return {
        name: {"batch": step.batch, "devices": [_device(one) for one in step.devices]} for name, step in steps.items()
    }


def _device(one: DeviceUse) -> dict[str, Any]:
    return {
        "name": one.name,
        "count": one.count,
        "peak_bytes": one.peak_bytes,
        "variable_bytes": one.variable_bytes,
        "timeline": [[at, nbytes] for at, nbytes in one.memory],
        "at_peak": [{"holder": holder, "bytes": nbytes} for holder, nbytes in one.holders],
    }


def to_svg(steps: Mapping[str, Simulation]) -> str:
    """Return a picture with a curve for each device, all in the same scale.

    Args:
        steps: simulated with their events, by name: before, after.
    """
    names = list(dict.fromkeys(one.name for step in steps.values() for one in step.devices))
    most = max((one.peak_bytes for step in steps.values() for one in step.devices), default=1) or 1
    end = max((step.step_seconds for step in steps.values()), default=1.0) or 1.0
    tall = HEIGHT + 3 * TEXT + (HOLDERS + 2) * TEXT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 40}" height="{tall * len(names) + TEXT}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for row, name in enumerate(names):
        own = {how: one for how, step in steps.items() for one in step.devices if one.name == name}
        parts.append(f'<g transform="translate(20,{row * tall + 2 * TEXT})">')
        peaks = ", ".join(f"{how} {one.peak_bytes / 2**20:,.2f} MiB" for how, one in own.items())
        parts.append(_text(0, -6, f"{name}: {peaks}; {end * 1e3:.3g} ms", "black"))
        parts.append(f'<path d="M0,0V{HEIGHT}H{WIDTH}" fill="none" stroke="#57606a"/>')
        for column, (how, one) in enumerate(own.items()):
            color = COLORS.get(how, "black")
            parts.append(f'<path d="{_path(one, end, most)}" fill="{color}" fill-opacity=".15" stroke="{color}"/>')
            parts.append(_text(column * WIDTH // 2, HEIGHT + 2 * TEXT, f"at the peak, {how}", color))
            for line, (holder, nbytes) in enumerate(one.holders[:HOLDERS]):
                words = f"{nbytes / 2**20:8.2f} MiB  {holder[-44:]}"
                parts.append(_text(column * WIDTH // 2, HEIGHT + (line + 3) * TEXT, words, "black"))
        parts.append("</g>")
    return "".join((*parts, "</svg>\n"))


def _path(one: DeviceUse, end: float, most: int) -> str:
    """Return the outline of live bytes over time, as steps."""
    points = [f"M0,{HEIGHT}"]
    for at, nbytes in one.memory:
        points.append(f"H{at / end * WIDTH:.1f}V{HEIGHT * (1 - nbytes / most):.1f}")
    return "".join((*points, f"H{WIDTH}V{HEIGHT}Z"))


def _text(x: int, y: int, words: str, color: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" xml:space="preserve">{html.escape(words)}</text>'
