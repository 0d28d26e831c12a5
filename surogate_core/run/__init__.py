"""One run, from a validated configuration to its export; and the other jobs on a run: merge, numerics."""
