"""The passes, which edit the graph, in the order of `pass_pipeline.PIPELINE`."""
