"""The cost model: compute by op, communication by latency and bandwidth, memory by liveness, simulated by events."""
