"""The configuration that a user writes: its sections, fields and checks."""
