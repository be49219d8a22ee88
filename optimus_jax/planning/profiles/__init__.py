"""What is there: clusters, hardware measured by probes, models, data."""
