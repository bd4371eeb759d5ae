"""Contracts by family of ops."""
