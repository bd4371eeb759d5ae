"""Preemption: a process that is asked to end finishes its step together with all others, saves, and ends in time."""
