"""Reads and writes published models, slice by slice: config.json, weights, adapters."""
