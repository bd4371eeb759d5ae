"""Local SGD: each replica takes steps with its part of the batch; variables are averaged every few steps."""
