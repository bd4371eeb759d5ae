"""Reshards: conversions on the edges where producer and consumer disagree."""
