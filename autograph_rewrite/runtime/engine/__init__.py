"""The engine: a rewritten graph runs in a session or is called natively, by the names of the original."""
