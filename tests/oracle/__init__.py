"""Whether a change of the code leaves every rewritten graph and every plan as they were: `make oracle`."""
