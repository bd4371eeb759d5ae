"""Sharding: blocks of variables and values along an axis: model axes, shards, variables split over the replicas."""
