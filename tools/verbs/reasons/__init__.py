"""Verbs that say why: of a rewrite, of a value, of a variable under a strategy."""
