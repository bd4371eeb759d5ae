"""Random programs in which only the order of accesses counts, run with delays (`python -m tests.orders 0:200 10`)."""
