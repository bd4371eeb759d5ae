"""Computes which rows of its input an op with a sliding window reads for rows of its output.

    3 rows, stride 1, one row of padding in front        output row r reads input rows r-1, r, r+1

      rows of the input     0 1 2 3 │ 4 5 6 7            a block on each of two devices
      the first reads       0 1 2 3   4                  its block, and one row of the other: the halo
      the second reads            3   4 5 6 7

The arithmetic is that of GSPMD's halo exchange (Xu et al. 2021, section 4.3), for blocks of known sizes, which may
differ. A halo may have rows of more than the next neighbour.
"""

from __future__ import annotations

from typing import NamedTuple

Rows = tuple[int, int]
"""The first row, and the row after the last."""
READ, READERS, NEIGHBOURS = "read", "readers", "neighbours"


class Window(NamedTuple):
    """A window that slides along one dimension.

    Attributes:
        size: rows from its first to its last.
        stride: rows from one window to the next.
        before: rows of padding in front of the input.
        rows: of the whole input.
        outputs: rows of the whole output.
    """

    size: int
    stride: int
    before: int
    rows: int
    outputs: int

    @property
    def after(self) -> int:
        """Rows of padding after the input."""
        return max(0, (self.outputs - 1) * self.stride - self.before + self.size - self.rows)

    @property
    def is_padded(self) -> bool:
        """Whether some window reads padding."""
        return bool(self.before or self.after)

    def covered(self, outputs: Rows) -> Rows:
        """Return the rows that some outputs read; rows outside the input are padding."""
        return outputs[0] * self.stride - self.before, (outputs[1] - 1) * self.stride - self.before + self.size

    def read(self, outputs: Rows) -> Rows:
        """Return the rows of the input that some outputs read."""
        first, end = self.covered(outputs)
        return max(0, first), min(self.rows, end)

    def reaching(self, rows: Rows) -> Rows:
        """Return the windows that contain some rows, as if windows continued past the ends of the input.

        The first of them begins no later than the rows.
        """
        least = -((self.size - 1 - rows[0] - self.before) // self.stride)
        return min(least, (rows[0] + self.before) // self.stride), (rows[1] - 1 + self.before) // self.stride + 1

    def readers(self, rows: Rows) -> Rows:
        """Return the outputs that read some rows; the window of the first begins no later than the rows."""
        first, end = self.reaching(rows)
        return max(0, min(first, self.outputs - 1)), min(end, self.outputs)

    def neighbours(self, rows: Rows) -> Rows:
        """Return some rows and all rows that share a window with one of them."""
        first, end = self.read(self.readers(rows))
        return first, max(end, rows[1])


class Halo(NamedTuple):
    """The rows that a device reads of a value that is split along the dimension of a window.

    Attributes:
        window: of the op that reads it.
        rows: of the input in each unit that blocks are counted in.
        outputs: rows of the output in each unit.
        reads: READ: the input rows that the device's outputs read. READERS: the outputs that read the device's input
            rows. NEIGHBOURS: the input rows that share a window with the device's input rows.
        beside: padding along the other dimension of the window, before and after.
        lowest: rows of padding are the lowest number instead of zero, so that a maximum ignores them.
    """

    window: Window
    rows: int
    outputs: int
    reads: str
    beside: Rows
    lowest: bool = False

    def own(self, units: Rows) -> Rows:
        """Return the rows of a device's block."""
        per_unit = self.outputs if self.reads == READERS else self.rows
        return units[0] * per_unit, units[1] * per_unit

    def span(self, units: Rows) -> Rows:
        """Return the rows that a device reads."""
        if self.reads == READ:
            return self.window.read(self.computes(units))
        mine = units[0] * self.rows, units[1] * self.rows
        return self.window.readers(mine) if self.reads == READERS else self.window.neighbours(mine)

    def computes(self, units: Rows) -> Rows:
        """Return the outputs that a device computes, or whose gradients it reads."""
        if self.reads == READ:
            return units[0] * self.outputs, units[1] * self.outputs
        return self.window.readers((units[0] * self.rows, units[1] * self.rows))

    def alike(self, units: int) -> Rows | None:
        """Return the rows that each device reads, counted from the first row of its block, padding included.

        None: the numbers differ, since the rows of a block are not its outputs times the stride.

        Args:
            units: in each block.
        """
        window, rows, outputs = self.window, units * self.rows, units * self.outputs
        if rows != outputs * window.stride:
            return None
        if self.reads == READ:
            return window.covered((0, outputs))
        readers = window.reaching((0, rows))
        if self.reads == READERS:
            return readers
        begin, end = window.covered(readers)
        return begin, max(end, rows)

    def padding(self, units: Rows) -> Rows:
        """Return the rows of padding that a device's windows read, before and after the rows that it reads."""
        first, end = self.window.covered(self.computes(units))
        return max(0, -first), max(0, end - self.window.rows)
