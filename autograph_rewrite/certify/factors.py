"""Judges claims by factors: names for dimensions of operands and results, as in Shardy's sharding rules.

    MatMul   (m k)(k n) -> (m n), k is folded       cut m: blocks of rows      cut k: contributions to a sum

A dimension without a name ("") cannot be split. At most one factor is split: that of the first operand that is split,
or of the entry of a shape operand that counts a block.

The text is in einsum's notation: operands, results, the folded factors after a bar, then traits:

"@mk,@kn->@mn|k linear 0 1"   a letter is a factor; @ are as many more dimensions as there are, aligned as numpy does
"=.,=.->=."                   = is @ where no operand stretches; . is a dimension that cannot be split
"n...,*->n... linear 0"       * is read whole, whatever its rank; as a result it is the same in every block
"#n...,....,n...->n..."       # is a shape, whose entries are named
"@,?@->.@ moves 0"            ? is a shape that may leave entries open: these dimensions cannot be split
"@+->@ added"                 + stands for this operand and all the later ones

Numbers after a trait are the operands that it applies to; without numbers it applies to all of them.

    linear   the op is linear in each of these operands while the others are replicated
    added    it is linear in all of them together, like a sum
    moves    the same, and their elements are only moved: contributions of any kind may be combined afterwards
    zeros    all results are zero if one of them is
    zero     all results are zero
    counts   results that count elements, and are the same on every replica
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autograph_rewrite.certify.seen import Seen, is_local, is_named_after, line_up, said
from autograph_rewrite.ir.claims import Claim, Dim
from autograph_rewrite.ir.types import dtypes

Names = tuple[str, ...]


@dataclass(frozen=True)
class Factors:
    """How the dimensions of operands and results belong together.

    Attributes:
        operands: names of each operand's dimensions; None for an operand that is read whole.
        results: names of each result's dimensions; None for a result that is the same in every block.
        folded: names over which the op reduces if a result lacks them.
        fold: the reduction.
        sizes: operands that are shapes; their names are those of the dimensions that their entries state.
        traits: by name of a trait, the operands or results that it applies to.
    """

    operands: tuple[Names | None, ...]
    results: tuple[Names | None, ...]
    folded: frozenset[str] = frozenset()
    fold: str = "sum"
    sizes: frozenset[int] = frozenset()
    traits: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def about(self, *traits: str) -> frozenset[int]:
        """Return the operands or results that some traits apply to."""
        return frozenset().union(*(self.traits.get(trait, ()) for trait in traits))


def judge(seen: Seen, factors: Factors | None) -> str | None:
    """Return the problem with the claims of a node; without factors, all of its values must be whole."""
    if factors is None or len(factors.results) != len(seen.results):
        return judge_whole(seen)
    if any(claim.kind == "partial" and 0 in (claim.shape or ()) for claim in seen.operands):  # without elements
        seen = replace(seen, operands=tuple(_of_nothing(claim) for claim in seen.operands))
    if any(claim.kind == "partial" for claim in seen.operands):
        problem, expected = _of_contributions(seen, factors)
    elif any(claim.differs for claim in seen.operands):
        problem, expected = _of_blocks(seen, factors)
    else:
        problem, expected = None, [Claim("replicated")] * len(seen.results)
    return problem or _compare(seen, expected) or _sizes(seen, factors) or _zeros(seen, factors)


def _of_nothing(claim: Claim) -> Claim:
    is_empty = claim.kind == "partial" and 0 in (claim.shape or ())
    return claim._replace(kind="replicated", op="") if is_empty else claim


def judge_whole(seen: Seen) -> str | None:
    """Return the problem with the claims of an op that must read whole values."""
    for index, claim in enumerate(seen.operands):
        if claim.differs:
            return f"input {index} is {said(claim)}, and it has to read all of it"
    zero = next((i for i, claim in enumerate(seen.results) if claim.zero), None)
    if zero is not None:
        return f"result {zero} is claimed to be zero, and nothing says so"
    return _compare(seen, [Claim("replicated")] * len(seen.results))


def _compare(seen: Seen, expected: Sequence[Claim]) -> str | None:
    for index, (claim, right) in enumerate(zip(seen.results, expected, strict=True)):
        if claim[:3] == right[:3] or (right.kind == "replicated" and claim.kind == "any" and _is_handle(seen, index)):
            continue
        if right.kind == "replicated" and claim.kind == "partial" and claim.op == "sum" and claim.zero:
            continue
        read = ", ".join(said(operand) for operand in seen.operands) or "nothing"
        return f"result {index} is claimed {said(claim)}; of {read} it makes {said(right)}"
    return None


def _is_handle(seen: Seen, index: int) -> bool:
    return seen.node.output_dtypes[index] in (dtypes.VARIANT, dtypes.RESOURCE)


# -- contributions


def _is_list(seen: Seen, index: int) -> bool:
    return seen.node.inputs[index].dtype == dtypes.VARIANT


def _of_contributions(seen: Seen, factors: Factors) -> tuple[str | None, Sequence[Claim]]:
    """Return contributions for contributions, if the op is linear in them and no other operand differs."""
    partial = [i for i, claim in enumerate(seen.operands) if claim.kind == "partial"]
    first = seen.operands[partial[0]]
    other = next((i for i, claim in enumerate(seen.operands) if claim.differs and claim[:3] != first[:3]), None)
    if other is not None:
        return f"input {partial[0]} is {said(first)}, and input {other} {said(seen.operands[other])}", ()
    joined, is_sum = factors.about("added", "moves"), first.op == "sum"
    # the element type of a list is not known here, but only gradients add up lists, and those are floating-point
    exact = factors.about("moves") or (is_sum and all(seen.is_inexact(i) or _is_list(seen, i) for i in partial))
    together = joined.issuperset(partial) and all(
        i in partial or (seen.operands[i].zero and is_sum) or seen.operands[i].kind == "any" for i in joined
    )
    alone = len(partial) == 1 and partial[0] in factors.about("linear")
    if not exact or not (together or alone):
        return f"input {partial[0]} is {said(first)}, in which it is not linear", ()
    made = Claim("partial", 0, first.op)
    return None, [Claim("replicated") if i in factors.about("counts") else made for i in range(len(seen.results))]


# -- blocks


def _of_blocks(seen: Seen, factors: Factors) -> tuple[str | None, Sequence[Claim]]:
    """Return the results of blocks along one factor: blocks, or contributions if it is folded."""
    index, name = _first(seen, factors)
    if not name:
        return f"input {index} is {said(seen.operands[index])}, along which it can't be cut", ()
    sizes: list[Dim] = []
    for i, (claim, names) in enumerate(zip(seen.operands, factors.operands, strict=True)):
        problem = _cut(claim, names, name, i in factors.sizes, sizes)
        if problem:
            return f"input {i} {problem} (input {index} is {said(seen.operands[index])})", ()
    if len(sizes) > 1 and not all(line_up(size, sizes[0]) for size in sizes):
        return f"blocks of {', '.join(map(str, sizes))} are not known to be the same rows", ()
    return None, [_made(names, name, factors) for names in factors.results]


def _first(seen: Seen, factors: Factors) -> tuple[int, str]:
    """Return the first operand that differs, and the factor along which it is split."""
    for index, (claim, names) in enumerate(zip(seen.operands, factors.operands, strict=True)):
        if not claim.differs:
            continue
        if names is None:
            return index, ""
        if claim.kind == "split":
            return index, names[claim.dim] if claim.dim < len(names) else ""
        at = [i for i, entry in enumerate(claim.value or ()) if is_local(entry)]
        fits = index in factors.sizes and len(at) == 1 and at[0] < len(names)
        return index, names[at[0]] if fits else ""
    raise AssertionError("none differs")


def _cut(claim: Claim, names: Names | None, name: str, is_size: bool, sizes: list[Dim]) -> str | None:
    """Return the problem with an operand if a factor is split; add the size of its block to `sizes`."""
    at = [i for i, mine in enumerate(names or ()) if mine == name]
    if not at:
        return f"is {said(claim)}, and has no such dimension" if claim.differs else None
    if len(at) > 1:
        return "has that dimension twice"
    if is_size:
        local = [i for i, entry in enumerate(claim.value or ()) if is_local(entry)]
        if claim.kind != "local" or local != at:
            return "has to state the size of a block, and that only"
        sizes.append((claim.value or ())[at[0]])
        return None
    if claim.kind == "any":  # an empty container
        return None
    if claim.kind != "split" or claim.dim != at[0]:
        return f"is {said(claim)}, and should be split({at[0]})"
    sizes.append(claim.shape[at[0]] if claim.shape is not None and at[0] < len(claim.shape) else None)
    return None


def _made(names: Names | None, name: str, factors: Factors) -> Claim:
    if names is None:
        return Claim("replicated")
    if names.count(name) > 1:  # a block of rows would have the columns of all rows
        return Claim("nothing that is right")
    if name in names:
        return Claim("split", names.index(name))
    return Claim("partial", 0, factors.fold) if name in factors.folded else Claim("nothing that is right")


# -- sizes and zeros


def _sizes(seen: Seen, factors: Factors) -> str | None:
    """Return the problem with a result whose dimension has another size than the operands with the same name."""
    known: dict[str, list[Dim]] = {}
    for i, (claim, names) in enumerate(zip(seen.operands, factors.operands, strict=True)):
        dims = claim.value if i in factors.sizes else claim.shape
        if names is None or dims is None or len(dims) != len(names) or claim.kind == "any":
            continue
        for name, dim in zip(names, dims, strict=True):
            if name and dim is not None and dim != -1:
                known.setdefault(name, []).append(dim)
    for i, (claim, names) in enumerate(zip(seen.results, factors.results, strict=True)):
        if names is None or claim.shape is None or claim.kind == "any":
            continue
        if len(claim.shape) != len(names):
            return f"result {i} is claimed to have {len(claim.shape)} dimensions, and has {len(names)}"
        for at, (name, dim) in enumerate(zip(names, claim.shape, strict=True)):
            problem = _size(dim, known.get(name, []), claim.kind == "split" and claim.dim == at, seen, i)
            if problem:
                return f"dimension {at} of result {i} {problem}"
    return None


def _size(dim: Dim, known: Sequence[Dim], is_cut: bool, seen: Seen, index: int) -> str | None:
    if is_cut != is_local(dim) and not (is_cut and dim is None):
        return f"is claimed to have {dim} rows, and is {'cut' if is_cut else 'whole'}"
    if dim is None or not known or is_named_after(dim, seen.node, index):
        return None
    alike = [one for one in known if isinstance(one, int) == isinstance(dim, int)]
    if alike and dim not in alike:
        return f"is claimed to be {dim}, of an operand with {alike[0]}"
    return None


def _zeros(seen: Seen, factors: Factors) -> str | None:
    """Return the problem with a result that is claimed to be zero without a reason."""
    by_one = any(seen.operands[i].zero for i in factors.about("linear", "zeros"))
    joined = factors.about("added", "moves")
    by_all = bool(joined) and all(seen.operands[i].zero for i in joined)
    wrong = next((i for i, claim in enumerate(seen.results) if claim.zero), None)
    if wrong is None or "zero" in factors.traits or by_one or by_all:
        return None
    return f"result {wrong} is claimed to be zero, and nothing says so"


# -- text


def factors_of(seen: Seen, text: str) -> Factors | None:
    """Return the factors that a text gives a node; None where the number of operands or their ranks do not fit."""
    pattern, *words = text.split()
    traits = _traits(words, len(seen.operands))
    if pattern == "-":
        return _unnamed(seen, traits)
    left, _, right = pattern.replace("=", "@").partition("->")
    right, _, folded = right.partition("|")
    folded, _, fold = folded.partition(":")
    terms, made = _repeated(left, len(seen.operands)), _repeated(right, len(seen.results))
    if len(terms) != len(seen.operands):
        return None
    widths = [_width(seen, i, term) for i, term in enumerate(terms)]
    named = [width for width, term in zip(widths, terms, strict=True) if term != "*" and width is not None]
    most, unknown = max(named, default=0), [i for i, width in enumerate(widths) if width is None]
    if min(named, default=0) < 0 or (unknown and not named) or not all(_follows(seen, i, terms[i]) for i in unknown):
        return _unnamed(seen, traits)
    stretches = sum("@" in term for term in terms if term[:1] != "?") > 1 and "=" not in pattern
    operands = tuple(
        _names(seen, i, term, most if widths[i] is None else widths[i] or 0, stretches) for i, term in enumerate(terms)
    )
    sums = {name for name in folded if name != "@"} | ({f"@{i}" for i in range(most)} if "@" in folded else set())
    return Factors(
        operands,
        tuple(None if term == "*" else _expand(term, most) for term in made),
        frozenset(sums),
        fold or "sum",
        frozenset(i for i, term in enumerate(terms) if term[:1] in ("#", "?") and operands[i] is not None),
        traits,
    )


def _traits(words: list[str], count: int) -> dict[str, frozenset[int]]:
    """Return, by trait, the operands that it applies to."""
    found: dict[str, list[int]] = {}
    for word in words:
        if word.isdigit():
            found[[*found][-1]].append(int(word))
        else:
            found[word] = []
    return {name: frozenset(operands or range(count)) for name, operands in found.items()}


def _repeated(text: str, count: int) -> list[str]:
    """Return the terms, of which the last may be repeated."""
    *terms, last = text.split(",")
    return [*terms, *[last[:-1]] * (count - len(terms))] if last.endswith("+") else [*terms, last]


def _unnamed(seen: Seen, traits: dict[str, frozenset[int]]) -> Factors | None:
    """Return factors without names, which hold for any ranks; None where an operand is split."""
    if any(claim.kind in ("split", "local") for claim in seen.operands):
        return None
    return Factors((None,) * len(seen.operands), (None,) * len(seen.results), traits=traits)


def _follows(seen: Seen, index: int, term: str) -> bool:
    """Return whether an operand of unknown rank has that of the others: a list, or a partial shape."""
    return term.startswith("?") or seen.node.inputs[index].dtype == dtypes.VARIANT


def _width(seen: Seen, index: int, term: str) -> int | None:
    """Return how many dimensions the @ of an operand stands for; None where its rank is not known, or does not fit."""
    claim, letters = seen.operands[index], term.removeprefix("#")
    if term in ("", "*"):
        return 0
    dims = None if term[0] == "?" else claim.value if term[0] == "#" else claim.shape
    if dims is None:
        return _guess(seen, claim, letters)
    return len(dims) - len(letters) + 1 if "@" in letters else 0 if len(dims) == len(letters) else None


def _guess(seen: Seen, claim: Claim, letters: str) -> int | None:
    """Return a width for an operand of unknown rank: any width is right for a single operand."""
    if "@" not in letters:
        return 0
    made = seen.results[0].shape if seen.results else None
    return (len(made) if made is not None else claim.dim + 1) if letters == "@" and len(seen.operands) == 1 else None


def _names(seen: Seen, index: int, term: str, width: int, stretches: bool) -> Names | None:
    if term == "*":
        return None
    names = _expand(term.lstrip("#?"), width)
    shape, value = seen.operands[index].shape, seen.value(index)
    if term.startswith("?"):
        if value is None or shape == () or len(value) != len(names):
            return None
        return tuple("" if entry == -1 else name for name, entry in zip(names, value, strict=True))
    if not stretches or term.startswith("#") or shape is None:
        return names
    return tuple("" if name[:1] == "@" and seen.stretches(index, at) else name for at, name in enumerate(names))


def _expand(term: str, width: int) -> Names:
    names: list[str] = []
    for letter in term:
        names += [f"@{i}" for i in reversed(range(width))] if letter == "@" else ["" if letter == "." else letter]
    return tuple(names)
