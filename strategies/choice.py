"""Export the choice of a builder for each variable under its documented path (docs/strategy/choosing.md)."""

from autograph_rewrite.strategies.builder import Choice, Parts, TrainedVariable

__all__ = ["Choice", "Parts", "TrainedVariable"]
