"""The parts of a plan, and what passes and runtime share: messages, lowerings, keys, names, the batch split."""
