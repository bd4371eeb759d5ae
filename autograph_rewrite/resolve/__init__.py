"""Decisions, made on facts and before any edit: reshard edges, servers, compression, stages, rematerialisation."""
