"""What the package promises about speed and memory, measured: `python -m benchmarks [name ...]`, or `make bench`.

One benchmark per file: `run` describes it and turns what its fresh processes measured into figures with targets.
`docs/benchmarks.md` says how to read them.
"""
