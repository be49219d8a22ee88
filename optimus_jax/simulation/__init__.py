"""Runs the controller on simulated clusters: scenarios, baseline policies, an oracle."""
