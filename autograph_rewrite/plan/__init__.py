"""The plan: the decisions that all workers of a job agree on before they rewrite, as data to read, edit and check."""
