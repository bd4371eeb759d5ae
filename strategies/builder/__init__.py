"""What strategy builders share: choices per variable, shards, servers, overrides."""
