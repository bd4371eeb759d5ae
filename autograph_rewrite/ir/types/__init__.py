"""The types of a graph: element types, attributes, op definitions, device names."""
