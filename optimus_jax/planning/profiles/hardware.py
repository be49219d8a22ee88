"""Measure the hardware profile of this run's devices, and cache it for later runs.

A profile belongs to the *setting* in which it was measured: devices and their number, driver, XLA
flags and JAX version. It is cached as JSON in the user's cache directory under the digest of the
setting, and measured again when the setting changes. In a run of several processes all processes
measure, but all use the first process's profile, so that they agree on plans.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from optimus_jax.cluster.distributed import broadcast_from_0
from optimus_jax.config.settings import build
from optimus_jax.devices.hosts import count_hosts, devices_by_host
from optimus_jax.errors import ConfigError, first_line
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link
from optimus_jax.planning.profiles.measurements import (
    ALL_REDUCE,
    CollectiveFit,
    fit_collectives,
)
from optimus_jax.planning.profiles.nvml import NvmlFacts, read_nvml
from optimus_jax.planning.profiles.probe_programs import Devices
from optimus_jax.planning.profiles.probes import Probed, ProbeSizes, ReportTime, probe
from optimus_jax.system.cache import measurements_directory, write_atomically
from optimus_jax.system.json_input import parse_json

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything on which measurements depend."""

    device_kind: str
    """Device kind, as named by the driver."""
    platform: str
    """JAX platform: `gpu` or `cpu`."""
    num_devices: int
    """Number of devices of all processes."""
    num_processes: int
    """Number of processes of the run."""
    num_hosts: int
    """Number of machines of the run."""
    processor: str
    """Processor of the host: its model, and the number of cores that this process may use."""
    driver: str | None
    """GPU driver version; None: unknown, or no driver is needed."""
    jax: str
    """JAX version."""
    jaxlib: str
    """jaxlib version."""
    xla_flags: str
    """The XLA_FLAGS environment variable."""
    probes: str
    """Digest of the probes' parameters."""

    @classmethod
    def now(cls, devices: Devices, sizes: ProbeSizes, driver: str | None) -> "Setting":
        """The setting of this run. Every process must call it."""
        return cls(
            device_kind=devices[0].device_kind,
            platform=devices[0].platform,
            num_devices=len(devices),
            num_processes=jax.process_count(),
            num_hosts=count_hosts(),
            processor=_processor(),
            driver=driver if devices[0].platform == "gpu" else None,
            jax=jax.__version__,
            jaxlib=importlib.metadata.version("jaxlib"),
            xla_flags=" ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
            probes=_digest(dataclasses.asdict(sizes)),
        )

    @property
    def digest(self) -> str:
        """Digest of all fields, which names the profile in the cache."""
        return _digest(dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """Measurements of a cluster's devices."""

    setting: Setting
    """The setting of the measurements."""
    measured_at: str
    """Time of measurement, ISO 8601 in UTC."""
    probed: Probed
    """Measured times."""
    fits: tuple[CollectiveFit, ...]
    """Latency and rate of collectives, by kind and mesh axis."""
    nvml: NvmlFacts
    """The driver's information about the GPUs of the first process's host."""

    def to_json(self) -> str:
        """The profile as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "HardwareProfile":
        """Inverse of `to_json`. Raises ConfigError, TypeError or ValueError for invalid input."""
        profile = build(cls, parse_json(text))
        if any(
            not 0 < each.time_s < math.inf
            for each in (
                *profile.probed.matmuls,
                *profile.probed.passes,
                *profile.probed.host_copies,
                *profile.probed.collectives,
            )
        ):
            raise ValueError("a time in it is not above 0")
        return profile

    def fit(self, kind: str, axis_size: int, stride: int = 1) -> CollectiveFit | None:
        """The fit of a collective over a mesh axis; None if it was not measured."""
        return next(
            (
                fit
                for fit in self.fits
                if (fit.kind, fit.axis_size, fit.stride) == (kind, axis_size, stride)
            ),
            None,
        )

    def cluster(self, cluster: Cluster) -> Cluster:
        """`cluster` with measured links. It must be the cluster that was measured."""
        intra_host = self._link(cluster.devices_per_host, 1, "inside the host")
        inter_host = (
            self._link(cluster.num_hosts, cluster.devices_per_host, "between hosts")
            if cluster.inter_host is not None
            else None
        )
        return replace(
            cluster,
            intra_host=intra_host or cluster.intra_host,
            inter_host=inter_host or cluster.inter_host,
            to_host=self._link_to_host() or cluster.to_host,
        )

    def _link_to_host(self) -> Link | None:
        largest = max(self.probed.host_copies, key=lambda each: each.num_bytes, default=None)
        return largest and Link(
            name="to the host, measured",
            bytes_per_s=largest.bytes_per_s,
            latency_s=None,
            source=f"{largest.num_bytes:,} bytes each way at the same time, {self.measured_at}",
        )

    def _link(self, axis_size: int, stride: int, where: str) -> Link | None:
        fit = self.fit(ALL_REDUCE, axis_size, stride)
        if fit is None or fit.bytes_per_s is None:
            return None
        hops = 2 * (axis_size - 1)  # in a ring: one pass to sum, one to distribute
        return Link(
            name=f"{where}, measured",
            bytes_per_s=fit.bytes_per_s,
            latency_s=fit.latency_s / hops,
            source=f"all-reduce over {axis_size} devices, {self.measured_at}",
        )


def profile_hardware(
    devices: Devices | None = None,
    *,
    progress: ReportTime | None = None,
    refresh: bool = False,
    sizes: ProbeSizes | None = None,
    cache: Path | None = None,
) -> HardwareProfile:
    """The profile of `devices`: cached, or measured now (at most two minutes).

    Every process must call it, before the devices hold a model.

    Args:
      devices: JAX devices in mesh order; None: all.
      progress: called with what is being measured.
      refresh: measure even if there is a cached profile.
      sizes: what to measure; None: the platform's default.
      cache: directory of profiles; None: `measurements_directory()`.
    """
    cached = _ProfileCache.of(devices, sizes, cache)
    if not refresh and (profile := cached.read()) is not None:
        return profile
    probed = probe(
        cached.devices, cached.sizes, several_hosts=cached.setting.num_hosts > 1, progress=progress
    )
    measured = HardwareProfile(
        setting=cached.setting,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        probed=probed,
        fits=fit_collectives(probed.collectives),
        nvml=cached.nvml,
    )
    if jax.process_index() == 0:
        write_atomically(cached.path, measured.to_json(), "the hardware profile")
    return HardwareProfile.from_json(broadcast_from_0(measured.to_json()))


def cached_profile() -> HardwareProfile | None:
    """The cached profile of all devices; None if there is none. Measures nothing.

    Every process must call it.
    """
    return _ProfileCache.of(None, None, None).read()


def profile_path() -> Path:
    """Cache path of the profile of all devices. Every process must call it."""
    return _ProfileCache.of(None, None, None).path


@dataclass(frozen=True, kw_only=True)
class _ProfileCache:
    """The cache entry of a profile, which may not exist."""

    devices: Devices
    sizes: ProbeSizes
    nvml: NvmlFacts
    setting: Setting
    path: Path

    @classmethod
    def of(
        cls, devices: Devices | None, sizes: ProbeSizes | None, cache: Path | None
    ) -> "_ProfileCache":
        devices = devices_by_host() if devices is None else devices
        sizes = sizes or ProbeSizes.of(
            np.asarray(devices, dtype=object)[0].platform, jax.process_count()
        )
        nvml = read_nvml()
        setting = Setting.now(devices, sizes, nvml.driver)
        return cls(
            devices=devices,
            sizes=sizes,
            nvml=nvml,
            setting=setting,
            path=(cache or measurements_directory()) / f"{setting.digest}.json",
        )

    def read(self) -> HardwareProfile | None:
        """The cached profile of the first process, on all processes; None if there is none."""
        found = _read(self.path, self.setting) if jax.process_index() == 0 else None
        text = broadcast_from_0("" if found is None else found.to_json())
        return HardwareProfile.from_json(text) if text else None


def _read(path: Path, setting: Setting) -> HardwareProfile | None:
    """The cached profile; None if there is none. An unusable file causes a warning."""
    try:
        profile = HardwareProfile.from_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, ConfigError) as error:
        warnings.warn(
            f"the hardware profile {path} cannot be used ({first_line(error)}) and is"
            " measured again",
            stacklevel=3,
        )
        return None
    if profile.setting != setting:
        warnings.warn(
            f"the hardware profile {path} does not match the setting in its file name, and is"
            " measured again",
            stacklevel=3,
        )
        return None
    return profile


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        names = (
            line.partition(":")[2].strip()
            for line in _CPU_INFO.read_text().splitlines()
            if line.startswith("model name")
        )
        model = next(names, "")
    except OSError:  # not Linux
        model = ""
    return f"{model or platform.processor() or platform.machine()}, {cores} cores"


def _digest(values: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
