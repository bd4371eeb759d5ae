"""Verifiers: invariants of every graph, folded or expanded, of one rank or all."""
