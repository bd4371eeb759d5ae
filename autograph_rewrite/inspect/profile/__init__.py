"""Profiles: what ran when in measured steps, by original node and by exchange, next to the prediction."""
