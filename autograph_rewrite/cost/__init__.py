"""What a plan costs: compute by op, exchanges by latency and bandwidth, memory by liveness, played event by event."""
