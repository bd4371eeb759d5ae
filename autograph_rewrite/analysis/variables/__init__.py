"""Variables in a training step: their roles, and whether they can be sharded."""
