"""Factors of contractions and convolutions, whose layout may be an attribute."""

from __future__ import annotations

from autograph_rewrite.certify.contracts.factors import Factors, Names
from autograph_rewrite.certify.contracts.patterns import factors_of
from autograph_rewrite.certify.contracts.seen import Seen


def matmul(seen: Seen) -> Factors | None:
    """Matrices, or stacks of them: rows m, columns n, and k which is summed over."""
    flips = ("transpose_a", "transpose_b") if seen.node.op == "MatMul" else ("adj_x", "adj_y")
    left = "km" if seen.node.attr(flips[0], False) else "mk"
    right = "nk" if seen.node.attr(flips[1], False) else "kn"
    stack = "" if seen.node.op == "MatMul" else "@"
    return factors_of(seen, f"{stack}{left},{stack}{right}->{stack}mn|k", linear=(0, 1))


def einsum(seen: Seen) -> Factors | None:
    """What the equation says; a name that an operand has twice can't be cut."""
    equation = seen.node.attr("equation").decode().replace(" ", "").replace("...", "@")
    left, _, right = equation.partition("->")
    folded = "".join(sorted(set(left) - set(right) - {",", "@"}))
    if "@" in left and "@" not in right:
        folded += "@"
    return factors_of(seen, f"{left}->{right}|{folded}", linear=tuple(range(len(seen.operands))))


def _channels(seen: Seen) -> Names | None:
    rank = seen.rank(0)
    if rank is None or rank < 2:
        return None
    is_first = seen.node.op != "BiasAddV1" and seen.node.attr("data_format") == b"NCHW"
    at = 1 if is_first else rank - 1
    return tuple("channel" if i == at else f"d{i}" for i in range(rank))


def bias_add(seen: Seen) -> Factors | None:
    """A number for each channel is added."""
    names = _channels(seen)
    return None if names is None else Factors((names, ("channel",)), (names,), added=frozenset((0, 1)))


def bias_add_grad(seen: Seen) -> Factors | None:
    """The sum over everything but the channels."""
    names = _channels(seen)
    if names is None:
        return None
    return Factors((names,), (("channel",),), frozenset(names) - {"channel"}, linear=(0,))


def batch_norm(seen: Seen) -> Factors | None:
    """Images keep apart where they are normalised by given statistics, which are handed on."""
    if seen.node.attr("is_training", True):
        return None
    rank = seen.rank(0)
    if rank is None:
        return None
    image = ("n", *("",) * (rank - 1))
    return Factors((image, None, None, None, None), (image, *(None,) * (len(seen.results) - 1)))


def batch_norm_grad(seen: Seen) -> Factors | None:
    """With given statistics, gradients of scale and offset are sums over the images."""
    if seen.node.attr("is_training", True):
        return None
    parameters = ",".join("*" for _ in seen.operands[2:])
    return factors_of(seen, f"n...,n...,{parameters}->n...,.,.,*,*|n")


def images(seen: Seen) -> Factors | None:
    """One transformation for all images, or one for each."""
    if seen.rank(1) is None:
        return None
    transforms = ("" if seen.stretches(1, 0) else "n", "")
    image = ("n", "", "", "")
    return Factors((image, transforms, *(None,) * (len(seen.operands) - 2)), (image,))
