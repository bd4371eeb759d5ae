"""Static shapes: recorded in the graph, or inferred op by op."""
