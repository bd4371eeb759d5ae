"""The parts that all passes share: the pass manager, the rewrite under way, the builder, the report."""
