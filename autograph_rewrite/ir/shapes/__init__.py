"""Static shapes, as the graph records them."""
