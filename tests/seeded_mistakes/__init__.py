"""Mistakes seeded into real rewrites: what a certificate of the rewritten graph has to refuse."""
