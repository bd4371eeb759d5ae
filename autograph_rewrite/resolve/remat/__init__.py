"""Rematerialisation: which activations are recomputed in the backward pass, and in which segments."""
