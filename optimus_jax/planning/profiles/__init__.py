"""Profiles of clusters, of hardware (measured by probes), of models and of data."""
