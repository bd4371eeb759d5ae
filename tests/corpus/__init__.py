"""Programs as users of public libraries write them, each trained on one device and distributed, and compared."""
