"""Compile plans for GPUs that this machine lacks, and read the compiled programs."""
