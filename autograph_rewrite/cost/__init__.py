"""The cost model: compute by op, communication by latency and bandwidth, memory by liveness, a simulation by events."""
