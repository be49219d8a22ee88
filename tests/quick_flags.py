"""Flags of XLA for quick compilation. It costs far more than running what tests compile, here and
in the programs that they start.

This module does not import JAX, which reads them when it starts.
"""

import importlib.metadata

QUICK_FLAGS = "--xla_backend_optimization_level=0"
"""A value of XLA_FLAGS. The number of devices is not in it."""
if importlib.metadata.version("jax") < "0.11":  # 0.11 refuses unknown options
    QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false"
