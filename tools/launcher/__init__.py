"""The launcher of a job's processes on this machine: it starts, watches, restarts and ends them together."""
