"""This machine's devices as a cluster to plan for: `--cluster here`."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from optimus_jax.errors import ConfigError, explain

if TYPE_CHECKING:
    from optimus_jax.mesh.topology import Topology
    from optimus_jax.planning.local_cluster import LocalCluster

THIS_MACHINE = "here"
"""Value of --cluster for this machine's devices, which are measured."""


def measured_here(
    cpu_devices: int | None,
    *,
    refresh: bool = False,
    check: "Callable[[Topology], object]" = lambda topology: None,
) -> "LocalCluster":
    """This machine's devices as a cluster, with their measured rates. Imports JAX.

    Args:
      cpu_devices: number of virtual CPU devices; None: the devices that JAX finds.
      refresh: whether to measure again what was measured before.
      check: called before anything is measured.
    Raises:
      ConfigError: the number is below 1.
    """
    from optimus_jax.devices.backend import unexpected_cpu_warning
    from optimus_jax.devices.cpu import use_cpu_devices
    from optimus_jax.mesh.build import discover
    from optimus_jax.planning.local_cluster import measure_devices

    if cpu_devices is not None:
        if cpu_devices < 1:
            raise ConfigError(
                explain(
                    "--cpu-devices must be at least 1",
                    given=f"--cpu-devices {cpu_devices}",
                    do="give 1 or more",
                )
            )
        use_cpu_devices(cpu_devices)
    topology = discover()
    if (warning := unexpected_cpu_warning()) is not None:
        print(warning, file=sys.stderr, flush=True)
    check(topology)
    progress = _show_progress if sys.stderr.isatty() else None
    return measure_devices(topology, refresh=refresh, progress=progress)


def _show_progress(text: str, share: float) -> None:
    """Show the progress of measuring on one line of the terminal, which is overwritten."""
    print(
        f"\r\x1b[Kmeasuring this machine: {share:4.0%} {text}"[:100],
        end="" if share < 1 else "\n",
        file=sys.stderr,
        flush=True,
    )
