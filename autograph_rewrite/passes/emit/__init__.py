"""Emission: devices, one instance per replica, order of accesses, outputs under their names."""
