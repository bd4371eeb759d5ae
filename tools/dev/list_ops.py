"""Generate docs/ops.md from the table of rules: every op type that has a rule, with its rule.

Run as `python -m autograph_rewrite.tools.dev.list_ops [PATH]` after changing a rule; a test compares the page with the
table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.types.opdefs import OWN
from autograph_rewrite.ops.rules.base import Rule, whole
from autograph_rewrite.ops.rules.signature import Labels, Placer, Signature, is_open
from autograph_rewrite.ops.rules.table import FAMILIES, TABLE
from autograph_rewrite.ops.traits import has
from autograph_rewrite.tools.dev.reference import table

DEFAULT = Path("docs/ops.md")

HEAD = """\
# Ops with a placement rule

Generated from the table of rules by `python -m autograph_rewrite.tools.dev.list_ops`; do not edit.

{total} op types: {placed} work on blocks, {whole} deliberately read whole values. An op that is not listed reads
whole values too, which is right but slower, and is named in the report (an error under `semantics.strict`).

How to read a signature such as `n... , * , n... -> .... (partial over n)`: one term per input and output, one sign
per dimension. A letter is a dimension that may be split, and stays split where the letter stands again; a dot is one
that may not; `*` is a parameter, read whole. Where dimensions stand apart, as in `... -c, * -> ... -c`, `...` is any
number of them that may be split, and `-c` one that may not. *once* marks ops that run one time, whatever the number
of replicas.
"""


def render() -> str:
    """Return the page, without the ops that only exist between two passes."""
    listed = {op: rule for op, rule in TABLE.items() if op not in OWN}
    on_blocks = sum(rule.place is not whole for rule in listed.values())
    parts = [HEAD.format(total=len(listed), placed=on_blocks, whole=len(listed) - on_blocks)]
    for module in FAMILIES:
        family = module.__name__.rpartition(".")[2]
        rules = {op: rule for op, rule in listed.items() if rule.family == family}
        if rules:
            parts.append("\n".join(_section(family, first_sentence(module.__doc__), rules)))
    return "\n".join(parts)


def _section(family: str, idea: str, rules: Mapping[str, Rule]) -> Iterable[str]:
    """Yield the lines of one family; ops with equal descriptions share a row."""
    rows = grouped((describe(op, rule), f"`{op}`") for op, rule in sorted(rules.items()))
    yield f"## {family}\n"
    yield f"{idea}\n"
    yield table(("ops", "rule"), *((" ".join(ops), text) for text, ops in rows.items()))


def describe(op: str, rule: Rule) -> str:
    """Return the description of a rule in one line."""
    text = _said(rule)
    if rule.pinned:
        text += " *once*"
    if has(op, "undefined_when_empty"):
        text += " (sums over empty blocks are replaced by zeros)"
    return text


def _said(rule: Rule) -> str:
    if rule.place is whole:
        return "Reads whole values."
    if isinstance(rule.place, Placer):
        if rule.place.constant is not None:
            return f"`{spell(rule.place.constant)}`"
        if rule.place.text:
            return f"`{rule.place.text}`"
        return first_sentence(rule.place.describe.__doc__)
    return first_sentence(rule.place.__doc__)


def spell(signature: Signature) -> str:
    """Return the text of a signature."""
    text = f"{_terms(signature.inputs)} -> {_terms(signature.outputs)}"
    return f"{text} (partial over {','.join(sorted(signature.summed))})" if signature.summed else text


def _terms(terms: Sequence[Labels | None]) -> str:
    written = [
        "*" if labels is None else "".join(label if is_open(label) else "." for label in labels) or "scalar"
        for labels in terms
    ]
    return " , ".join(written)


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a docstring on one line, safe inside a table."""
    paragraph = " ".join((text or "").strip().partition("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].rstrip(".")
    return f"{sentence.replace('|', '/')}."


def main() -> None:
    """Write the page."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    path.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
