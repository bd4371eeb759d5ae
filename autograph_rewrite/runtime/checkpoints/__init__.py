"""Checkpoints: each worker writes its part beside the next steps, and a whole one is that of one device."""
