"""The pace of a program's checkpoints: how many of its steps one call makes, found by the steps that it names.

save(100) behind 100 calls, save(200) behind 200     1: behind 250 calls its step is 250
save(1) behind 500 calls                             none: it counts epochs, and only the program can save in between
restore() of step 200, saved at a pace of 1          1: behind 30 calls more its step is 230
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autograph_rewrite.runtime.checkpoints.folder import Manifest


class Pace:
    """The pace of the checkpoints of one manager.

    Attributes:
        last: the step of the last checkpoint; None: there is none.
        steps_per_call: the pace; 0: it is not known.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        self._from = 0, 0
        self.steps_per_call = 0
        self._has_extra = False

    def restored(self, checkpoint: Manifest, calls: int) -> None:
        """Note that a checkpoint was read: its pace holds until this program's own is known.

        Args:
            checkpoint: what it says of itself.
            calls: that this process has made.
        """
        self.last, self._from, self._has_extra = checkpoint.step, (checkpoint.step, calls), bool(checkpoint.extra)
        self.steps_per_call = self.steps_per_call or checkpoint.steps_per_call

    def saved(self, step: int, calls: int, extra: Mapping[str, Any] | None) -> None:
        """Note that a checkpoint is written.

        Args:
            step: that the program names.
            calls: that this process has made.
            extra: what the program adds to it.
        """
        step_before, calls_before = self._from
        steps, made = step - step_before, calls - calls_before
        if made:
            self.steps_per_call = steps // made if steps > 0 and steps % made == 0 else 0
        self.last, self._from, self._has_extra = step, (step, calls), bool(extra)

    def step(self, calls: int) -> int | None:
        """Return the step that the program would name; None where only the program can tell.

        Args:
            calls: that this process has made.
        """
        step, before = self._from
        if calls == before:
            return self.last
        return step + self.steps_per_call * (calls - before) if self.steps_per_call and not self._has_extra else None
