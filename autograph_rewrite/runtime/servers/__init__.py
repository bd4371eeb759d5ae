"""Parameter servers: processes that serve the workers of a job, and end after them."""
