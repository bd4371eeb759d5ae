"""Variable sharding: handles, updates, lookups, optimizer slots."""
