"""Sessions that meet on servers: what their stores hold after a failure, who may be ahead, and when a run is over."""
