"""This process in its job: server, failures of others, agreement, exchanges, and where it stops and goes on."""
