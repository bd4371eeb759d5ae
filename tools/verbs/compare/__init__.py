"""The verbs that compare a rewrite with the original."""
