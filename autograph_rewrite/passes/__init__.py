"""The edits, one per file, in the order of `pipeline.py`."""
