"""Sharding: blocks of variables and values along an axis: model axes, shards, what replicas share out."""
