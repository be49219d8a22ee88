"""The controller against simulated clusters: scenarios, rivals, an oracle."""
