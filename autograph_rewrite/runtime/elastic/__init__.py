"""Elastic jobs: a job that loses a worker goes on with the others, from a snapshot in memory, to the same weights."""
