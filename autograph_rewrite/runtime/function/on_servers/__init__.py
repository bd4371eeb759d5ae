"""Variables on servers, as the steps of functions see them: fetched when asked for, and written by worker 0."""
