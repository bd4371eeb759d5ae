"""Mistakes in files, reported all together, each with its line."""
