"""Rules of propagation: what each op makes of placements, a family of ops per module (all: `analysis.rule_table`)."""
