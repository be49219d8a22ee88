"""Starts JAX: its settings, backend, virtual CPU devices, hosts; data sheets of GPUs."""
