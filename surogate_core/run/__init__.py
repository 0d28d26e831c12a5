"""One run, from a validated configuration to its export."""
