"""How far a process has come, for whoever looks from outside."""
