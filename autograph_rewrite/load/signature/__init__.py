"""The training signature of a graph: inputs, outputs, train ops, variables, captures."""
