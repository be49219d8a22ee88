"""Starts JAX: its settings, backend, virtual CPU devices and hosts; accelerators' data sheets."""
