"""The model axis: what is cut on it, and which logical device each node runs on."""
