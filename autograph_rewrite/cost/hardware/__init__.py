"""The hardware model: compute, links, topology."""
