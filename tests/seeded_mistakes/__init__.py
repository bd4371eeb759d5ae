"""Mistakes seeded into real rewrites: what a certificate, or the verifier of all ranks of a job, has to refuse."""
