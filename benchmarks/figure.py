"""A figure: one measured number, the target that it has to meet, and how it came about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        name: what was measured.
        value: the number.
        unit: what follows it; "x" for a ratio.
        at_most: the target, where small is good.
        at_least: the target, where large is good; with neither, the figure is only for information.
        how: what it was made of.
    """

    name: str
    value: float
    unit: str = "x"
    at_most: float | None = None
    at_least: float | None = None
    how: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.at_most is not None:
            return self.value <= self.at_most
        return self.value >= self.at_least if self.at_least is not None else None

    @property
    def target(self) -> str:
        """The target in words."""
        if self.at_most is not None:
            return f"<= {number(self.at_most)}"
        return f">= {number(self.at_least)}" if self.at_least is not None else ""

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**asdict(self), "met": self.met}


def number(value: float) -> str:
    """Print a number with as many digits as it is good for."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


_MARKS = {True: "[green]yes", False: "[bold red]NO", None: ""}


def show(console: Console, title: str, figures: Iterable[Figure]) -> None:
    """Print a table of figures."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("figure", overflow="fold", ratio=4)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("met", no_wrap=True)
    table.add_column("how", style="dim", overflow="fold", ratio=5)
    for figure in figures:
        measured = f"{number(figure.value)} {figure.unit}".replace(" x", "x")
        table.add_row(figure.name, measured, figure.target, _MARKS[figure.met], figure.how)
    console.print(table)


def milliseconds(seconds: float) -> str:
    """Print a time."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"
