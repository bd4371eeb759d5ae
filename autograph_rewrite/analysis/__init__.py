"""Analyses before any edit: sizes and placements of values, where sums are taken, how variables are used."""
