"""The hardware profile: what was measured on the devices that are there, kept for the next run.

A profile belongs to the *setting* that it was measured in: the devices, their number, the driver,
XLA's flags and JAX's version. It is kept as JSON in the user's cache directory, under the setting's
digest, and measured again when anything of that changes. In a run of several processes all measure
and the first one's profile counts, so that all plan alike.
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
from optimus_jax.errors import ConfigError
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link
from optimus_jax.planning.profiles.measurements import (
    ALL_REDUCE,
    CollectiveFit,
    fit_collectives,
)
from optimus_jax.planning.profiles.nvml import NvmlFacts, read_nvml
from optimus_jax.planning.profiles.probe_programs import Devices
from optimus_jax.planning.profiles.probes import Probed, ProbeSizes, Progress, probe
from optimus_jax.system.cache import measurements_directory, write_whole
from optimus_jax.system.json_input import parse_json

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What measurements depend on."""

    device_kind: str
    """The driver's name of the devices."""
    platform: str
    """JAX's: `gpu` or `cpu`."""
    num_devices: int
    """Of all processes."""
    num_processes: int
    """Of the run."""
    num_hosts: int
    """Machines that they are on."""
    processor: str
    """Of the host: model and cores that this process may use."""
    driver: str | None
    """Version of the GPUs' driver; None: unknown, or none is needed."""
    jax: str
    """Version."""
    jaxlib: str
    """Version."""
    xla_flags: str
    """The environment's XLA_FLAGS."""
    probes: str
    """Digest of what is measured, and how."""

    @classmethod
    def now(cls, devices: Devices, sizes: ProbeSizes, driver: str | None) -> "Setting":
        """Of this run. Every process has to call it."""
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
        """Names it in the cache."""
        return _digest(dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """What was measured on some devices."""

    setting: Setting
    """What it depends on."""
    measured_at: str
    """ISO 8601, UTC."""
    probed: Probed
    """Times."""
    fits: tuple[CollectiveFit, ...]
    """Latency and rate of collectives, by kind and mesh axis."""
    nvml: NvmlFacts
    """What the driver says about the GPUs of the first process's host."""

    def to_json(self) -> str:
        """For the cache and for people."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "HardwareProfile":
        """Raises ConfigError, TypeError or ValueError if it is not a profile."""
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
        """Of a kind of collective over a mesh axis; None: not measured."""
        return next(
            (
                fit
                for fit in self.fits
                if (fit.kind, fit.axis_size, fit.stride) == (kind, axis_size, stride)
            ),
            None,
        )

    def cluster(self, cluster: Cluster) -> Cluster:
        """`cluster`, which is the one that was measured, with links as they were measured."""
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
        hops = 2 * (axis_size - 1)  # of a ring: once around to sum, once to hand out
        return Link(
            name=f"{where}, measured",
            bytes_per_s=fit.bytes_per_s,
            latency_s=fit.latency_s / hops,
            source=f"all-reduce over {axis_size} devices, {self.measured_at}",
        )


def profile_hardware(
    devices: Devices | None = None,
    *,
    progress: Progress | None = None,
    refresh: bool = False,
    sizes: ProbeSizes | None = None,
    cache: Path | None = None,
) -> HardwareProfile:
    """The profile of `devices`: kept from an earlier run, or measured now (at most two minutes).

    Every process of a run has to call it, before there is a model on the devices.

    Args:
      devices: of JAX, in the order of the mesh; None: all.
      progress: told what is being measured.
      refresh: measure in any case.
      sizes: what to measure; None: what suits the platform.
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
        write_whole(cached.path, measured.to_json(), "the hardware profile")
    return HardwareProfile.from_json(broadcast_from_0(measured.to_json()))


def cached_profile(
    devices: Devices | None = None, *, sizes: ProbeSizes | None = None, cache: Path | None = None
) -> HardwareProfile | None:
    """The profile of an earlier run; None if there is none. Nothing is measured.

    Arguments of `profile_hardware`; every process calls it.
    """
    return _ProfileCache.of(devices, sizes, cache).read()


def profile_path(
    devices: Devices | None = None, *, sizes: ProbeSizes | None = None, cache: Path | None = None
) -> Path:
    """Where the profile of these devices is kept, if it is; every process calls it."""
    return _ProfileCache.of(devices, sizes, cache).path


@dataclass(frozen=True, kw_only=True)
class _ProfileCache:
    """Where a profile is kept, if it is."""

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
        """What the first process finds there."""
        found = _read(self.path, self.setting) if jax.process_index() == 0 else None
        text = broadcast_from_0("" if found is None else found.to_json())
        return HardwareProfile.from_json(text) if text else None


def _read(path: Path, setting: Setting) -> HardwareProfile | None:
    """The profile kept there; None if there is none. One that cannot be used is a warning."""
    try:
        profile = HardwareProfile.from_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, ConfigError) as error:
        warnings.warn(
            f"the hardware profile {path} cannot be used ({str(error).splitlines()[0]}) and is"
            " measured again",
            stacklevel=3,
        )
        return None
    if profile.setting != setting:
        warnings.warn(
            f"the hardware profile {path} is of another setting than its name says, and is measured"
            " again",
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
