"""What is known about each value before anything is rewritten: sizes, placements, where reductions go."""
