"""Agents of an elastic job: one per host; they meet, number the generations, and go on without hosts that are lost."""
