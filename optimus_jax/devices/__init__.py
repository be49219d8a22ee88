"""Starts JAX: its settings, backend, virtual CPU devices and hosts. Also accelerators' data
sheets."""
