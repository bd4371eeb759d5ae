"""Variable sharding: where variables live that are split over replicas; parts of all others, and their updates."""
