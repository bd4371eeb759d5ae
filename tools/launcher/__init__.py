"""Launch the processes of a job on this machine: start, watch, restart, end them together."""
