"""Consensus of all workers: on their graphs and plans, on their data, on values outside of a step."""
