"""The documented import path of what a strategy builder returns for each variable (docs/strategy/choosing.md)."""

from autograph_rewrite.strategies.builder import Choice, Parts, TrainedVariable

__all__ = ["Choice", "Parts", "TrainedVariable"]
