"""Local SGD: each replica takes steps of its own with its part of the batch; variables are averaged every so often."""
