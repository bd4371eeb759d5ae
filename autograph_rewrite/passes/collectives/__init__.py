"""All-reduce and all-gather: in one process, with collectives, and through stores on servers."""
