"""Compile plans ahead of time, even for absent GPUs, and read the compiled programs."""
