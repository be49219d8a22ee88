"""The controller against simulated clusters: scenarios, other policies, an oracle."""
