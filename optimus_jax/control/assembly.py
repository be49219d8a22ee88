"""A controller for a run, put together from its parts."""

import re
import threading
from collections.abc import Callable
from dataclasses import replace

from optimus_jax.config import Config, ParallelConfig
from optimus_jax.control.advisor import Advisor
from optimus_jax.control.candidates import search_now
from optimus_jax.control.controller import Controller
from optimus_jax.control.executables import of_running
from optimus_jax.control.journal import Journal, switches
from optimus_jax.control.live import Probes, live_signals
from optimus_jax.control.reported import ReportedDevices
from optimus_jax.control.switch import Switcher
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.hardware import kept_profile
from optimus_jax.planning.here import Here
from optimus_jax.planning.kept import cache_directory
from optimus_jax.planning.search import Pricing, Ranking
from optimus_jax.training.display import Display
from optimus_jax.training.objective import Batch
from optimus_jax.training.run_directory import RunDirectory
from optimus_jax.training.step import Program


def make_controller(config: Config, topology: Topology, here: Here, program: Program, train_step: object, step_bytes: int, *,
                    probe: Callable[[Program], Batch], run: RunDirectory, display: Display) -> Controller:
    """The controller of a run that begins under `program`; every process has to call it.

    Args:
      config: says when it may act.
      here: how fast the devices are.
      train_step: the program's, compiled.
      step_bytes: that it needs on a device.
      probe: a batch for a program, always the same, whose loss is compared before and after a switch.
    """
    assert config.control != "off"
    settings, pricing = config.controller, here.pricing(freed(config))
    advisor = Advisor(
        pricing=pricing, plan=program.plan, num_steps=config.steps, settings=settings, searcher=_BackgroundSearch(),
        memory=cache_directory() / f"control-{re.sub(r'[^a-z0-9]+', '-', topology.device_kind.lower())}-{topology.num_devices}.json")
    for record in switches(run.path):
        if record.is_failure:
            advisor.failed(record.target, f"it was tried at step {record.step}: {record.ended_why}")
    probes = Probes(settings.probe_share, here.cluster, kept_profile())
    signals = live_signals(settings, global_batch=config.data.global_batch, seq_len=config.seq_len, rounds=probes.on(program.mesh),
                           run_directory=run.path, warn=display.message)
    switcher = Switcher(running=of_running(program, train_step, step_bytes), settings=settings, journal=Journal(run),
                        bytes_per_device=topology.bytes_per_device, probe=probe)
    return Controller(mode="auto" if config.control == "auto" else "advise", settings=settings, num_steps=config.steps, advisor=advisor, signals=signals,
                      probes=probes, switcher=switcher, reported=ReportedDevices(run.path, display.message), run=run, display=display)


def freed(config: Config) -> Config:
    """The config without what it says of the layout: that is where a run begins, and not where it has to stay.

    How arithmetic is done (attention kernel, chunks of the loss) stays. `controller.allow` says which meshes may be used.
    """
    given = config.parallel
    return replace(config, parallel=ParallelConfig(attention=given.attention, loss_chunk_tokens=given.loss_chunk_tokens, trials=given.trials))


class _BackgroundSearch:
    """Searches in threads, so that steps go on meanwhile."""

    def __init__(self) -> None:
        self._found: dict[int, Ranking] = {}
        self._at_work: set[int] = set()

    def __call__(self, pricing: Pricing) -> Ranking | None:
        """The best plans; None: ask again at a later step."""
        key = hash((pricing.config, pricing.cluster, pricing.rates))
        if key in self._found:
            self._at_work.discard(key)
            return self._found.pop(key)
        if key not in self._at_work:
            self._at_work.add(key)
            threading.Thread(target=self._search, args=(key, pricing), name="search", daemon=True).start()
        return None

    def _search(self, key: int, pricing: Pricing) -> None:
        try:
            self._found[key] = search_now(pricing)
        except PlanError:
            self._found[key] = Ranking(best=(), rejections=(), num_priced=0)
