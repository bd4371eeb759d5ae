"""Plan verification, before anything is edited."""
