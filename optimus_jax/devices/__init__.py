"""Which devices JAX finds, and under which of its own settings: backend, virtual CPU devices, hosts, data sheets."""
