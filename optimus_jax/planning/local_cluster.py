"""Describe the devices of this run as a cluster, with rates and corrections measured on them.

Rates come from a cached hardware profile, or else from data sheets; if there is neither, they are
unknown. Measured step times are stored next to the profiles, in one file per kind and number of
devices.
"""

import datetime
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax

from optimus_jax.config import Config
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.learning.calibrate import Calibration
from optimus_jax.planning.learning.records import (
    Record,
    append_record,
    calibration_of,
    read_records,
)
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.hardware import (
    HardwareProfile,
    cached_profile,
    profile_hardware,
    profile_path,
)
from optimus_jax.planning.profiles.probes import ReportTime
from optimus_jax.planning.search.search import Pricing
from optimus_jax.planning.trials.reference_steps import (
    fitted,
    path_of,
    read_steps,
    time_reference_steps,
    write_steps,
)
from optimus_jax.system.cache import measurements_directory


@dataclass(frozen=True, kw_only=True)
class LocalCluster:
    """The devices of this run, with their rates and measured step times."""

    cluster: Cluster
    rates: Rates
    records: Path
    """JSON Lines file of measured step times."""

    @cached_property
    def calibration(self) -> Calibration:
        """Corrections learnt from the records, computed on first use.

        Empty in a run of several processes: each process has its own files, but their predictions
        must agree.
        """
        return (
            Calibration() if jax.process_count() > 1 else calibration_of(read_records(self.records))
        )

    def pricing(self, config: Config) -> Pricing:
        """The cost model for a run of `config`."""
        return Pricing(config, self.cluster, self.rates, self.calibration)

    def remember(self, config: Config, plan: Plan, step_time_s: float) -> None:
        """Record the measured step time of `plan` with its prediction."""
        if jax.process_index() == 0:
            prediction = self.pricing(config).uncalibrated(plan)
            append_record(
                self.records,
                Record(
                    model=config.model.name,
                    plan=plan.digest,
                    measured_s=step_time_s,
                    terms_s={term.name: term.time_s for term in prediction.terms},
                    measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                ),
            )


def measure_devices(
    topology: Topology, *, refresh: bool = False, progress: ReportTime | None = None
) -> LocalCluster:
    """Measure this run's devices (one to three minutes), or use earlier measurements.

    Every process must call it.
    """
    profile = profile_hardware(refresh=refresh, progress=progress)
    path = path_of(profile_path(), topology)
    if refresh or not read_steps(path):
        write_steps(path, time_reference_steps(topology, progress=progress))
    return _profiled(topology, profile)


def known_devices(topology: Topology) -> LocalCluster | None:
    """This run's devices, described without measuring; None if their speed is unknown.

    Every process must call it.
    """
    if (profile := cached_profile()) is not None:
        return _profiled(topology, profile)
    cluster = Cluster.of(topology)
    try:
        return LocalCluster(
            cluster=cluster, rates=Rates.of(cluster.accelerator), records=_records(topology)
        )
    except PlanError:
        return None


def _profiled(topology: Topology, profile: HardwareProfile) -> LocalCluster:
    cluster, steps = (
        profile.cluster(Cluster.of(topology)),
        read_steps(path_of(profile_path(), topology)),
    )
    return LocalCluster(
        cluster=cluster,
        rates=fitted(Rates.from_profile(profile), steps, topology, cluster),
        records=_records(topology),
    )


def _records(topology: Topology) -> Path:
    kind = re.sub(r"\W+", "-", topology.device_kind).strip("-").lower()
    return measurements_directory() / f"steps-{kind}-{topology.num_devices}.jsonl"
