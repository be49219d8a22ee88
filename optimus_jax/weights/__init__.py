"""Reads published models: config.json, safetensors and PyTorch files, slice by slice."""
