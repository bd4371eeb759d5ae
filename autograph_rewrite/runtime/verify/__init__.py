"""The numeric check: original and rewritten graph side by side."""
