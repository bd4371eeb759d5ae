"""Checkpoints: each worker writes its part during the next steps, and a whole one is that of one device."""
