"""Random training programs under random configurations, each compared with one device: `make fuzz`."""
