"""The parts of a plan, and definitions for passes and runtime: messages, lowerings, keys, names, the batch split."""
