"""Reads and writes graphs: GraphDef bytes, the printed form, function libraries."""
