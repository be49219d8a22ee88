"""Time a few real steps: of the best candidates before a run, and of reference steps."""
