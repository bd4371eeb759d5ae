"""Scripts for developers: the shipped op registry, docs/ops.md."""
