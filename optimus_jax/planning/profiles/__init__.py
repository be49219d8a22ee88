"""Profiles of clusters, hardware (measured by probes), models and data."""
