"""The cost of a step in pipeline stages: tasks, memory and bubble."""
