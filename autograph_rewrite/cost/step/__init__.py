"""The analysed step: its nodes, how often they run, and their work."""
