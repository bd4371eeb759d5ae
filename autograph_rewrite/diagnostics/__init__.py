"""Mistakes in files, all reported together with their lines; limits, amounts and progress."""
