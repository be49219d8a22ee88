"""Assembles the controller of a run from its parts."""

import contextlib
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax

from optimus_jax.config import Config, ParallelConfig
from optimus_jax.config.phases import phases_of
from optimus_jax.control import constants
from optimus_jax.control.advisor import Advisor
from optimus_jax.control.controller import Controller
from optimus_jax.control.deciding.candidates import search_now
from optimus_jax.control.deciding.switch_costs import SwitchCosts
from optimus_jax.control.journal import SwitchRecord, switches
from optimus_jax.control.live import Probes, live_signals
from optimus_jax.control.machine import resumed
from optimus_jax.control.phase_changes import PhaseChanges
from optimus_jax.control.reported_devices import ReportedDevices
from optimus_jax.control.switch import Switcher
from optimus_jax.control.switch_state import SwitchRules, SwitchState
from optimus_jax.control.transitions import quarantined
from optimus_jax.errors import PlanError
from optimus_jax.faults.heartbeat import Heartbeats
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.local_cluster import LocalCluster
from optimus_jax.planning.profiles.hardware import cached_profile
from optimus_jax.planning.search.search import Pricing, Ranking
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.system.cache import measurements_directory
from optimus_jax.training.watchers import Display


def make_controller(
    config: Config,
    topology: Topology,
    local_cluster: LocalCluster,
    switcher: Switcher,
    *,
    compile_s: float,
    tried_s: Mapping[Plan, float],
    changes: PhaseChanges | None,
    heartbeats: Heartbeats | None,
    run: RunDirectory,
    display: Display,
) -> Controller:
    """Make the controller of a run; every process has to call it.

    Args:
      config: the config of the whole run, which says when the controller may act.
      topology: devices and processes of the run.
      local_cluster: how fast the devices are.
      switcher: makes the run's switches; its running executable is what the run begins with.
      compile_s: seconds that compiling the run's step took; the first estimate of a switch's cost
        is made from it.
      tried_s: step times, in seconds, of plans that were tried before the run; in process 0 only.
      changes: moves the run from phase to phase; None: it has only one.
      heartbeats: heartbeats of the run's processes; None: the watchdog is off.
      run: where decisions and switches are recorded.
      display: where they are shown.
    """
    assert config.control != "off"
    program = switcher.running.program
    shares_cores = topology.platform == "cpu"
    prepare_s = constants.PREPARE_COMPILE_RATIO * compile_s
    settings, pricing = config.controller, local_cluster.pricing(freed(program.config))
    if shares_cores and jax.process_index() == 0:
        # The first search traces the model's layers and head, for seconds in which steps beside it
        # would be slow. Later ones take hundredths of a second.
        with contextlib.suppress(PlanError):
            search_now(pricing)
    advisor = Advisor(
        pricing=pricing,
        plan=program.plan,
        num_steps=config.steps,
        settings=settings,
        searcher=_BackgroundSearch(),
        phases=phases_of(config) if changes else (),
        costs=SwitchCosts(
            # On shared cores training pauses for it.
            prepare_s=0.0 if shares_cores else prepare_s,
            compile_tax_s=prepare_s if shares_cores else constants.COMPILE_TAX_SHARE * compile_s,
            subset_restarts=topology.num_processes > 1,
        ),
        is_compiled=switcher.is_compiled,
        tried_s=tried_s,
        # Fewer processes would be another run, which only the launcher can start. A single process
        # can leave out devices, each of which is probed by itself.
        process_of=topology.processes
        if topology.num_processes > 1
        else range(topology.num_devices),
        keeps_devices=topology.num_processes > 1,
        learnt_path=measurements_directory()
        / f"control-{re.sub(r'[^a-z0-9]+', '-', topology.device_kind.lower())}"
        f"-{topology.num_devices}x{topology.num_processes}.json",
    )
    rules = SwitchRules(
        settings=settings,
        num_steps=config.steps,
        phase_ends=tuple([phase.steps_before for phase in phases_of(config)]),
        acts=config.control == "auto",
        shares_cores=shares_cores,
    )
    earlier = switches(run.path)
    for owed_s in costs_owed(earlier):
        advisor.charge(owed_s)
    reported = ReportedDevices(
        run.path,
        devices=[device.id for device in program.mesh.devices.flat],
        can_leave=topology.num_processes == 1,
        warn=display.message,
    )
    probes = Probes(
        settings.probe_share,
        local_cluster.cluster,
        cached_profile(),
        num_meshes=settings.executables,
        devices=list(program.mesh.devices.flat),
        lost=reported,
        warn=display.message,
    )
    signals = live_signals(
        settings,
        global_batch=program.config.data.global_batch,
        seq_len=program.config.seq_len,
        rounds=probes.on(program.mesh),
        heartbeats=heartbeats,
        warn=display.message,
    )
    return Controller(
        reported=reported,
        compile_pause_s=constants.MAX_COMPILE_PAUSE * prepare_s if shares_cores else 0.0,
        policy=advisor,
        rules=rules,
        state=state_after(earlier, rules),
        signals=signals,
        probes=probes,
        switcher=switcher,
        changes=changes,
        run=run,
        display=display,
    )


def state_after(records: Sequence[SwitchRecord], rules: SwitchRules) -> SwitchState:
    """The state of a run that is resumed after these switches."""
    state = SwitchState()
    for record in records:
        state = resumed(
            state,
            record.step,
            rules,
            by_choice=record.by_choice,
            is_made=record.ending != "failed",
        )
        if record.is_failure:
            why = f"it was tried at step {record.step}: {record.ended_why}"
            ended_step = record.step if record.ended_step is None else record.ended_step
            state = quarantined(state, record.target, ended_step, why, rules)
    return state


def costs_owed(records: Sequence[SwitchRecord]) -> list[float]:
    """The costs of earlier switches by choice, in seconds, that a resumed run owes.

    What a plan that was kept has saved is not known any more; it counts as paid for.
    """
    return [
        sum(record.costs_s.values())
        for record in records
        if record.by_choice and record.ending != "kept"
    ]


def freed(config: Config) -> Config:
    """The config without its layout: the run begins with the given layout, but may leave it.

    How the arithmetic is done (attention kernel, chunks of the loss) stays. `controller.allow` says
    which meshes may be used.
    """
    given = config.parallel
    return replace(
        config,
        parallel=ParallelConfig(
            attention=given.attention,
            loss_chunk_tokens=given.loss_chunk_tokens,
            trials=given.trials,
        ),
    )


class _BackgroundSearch:
    """Searches for plans in threads, so that training continues meanwhile."""

    def __init__(self) -> None:
        self._found: dict[int, Ranking | Exception] = {}
        self._at_work: set[int] = set()

    def __call__(self, pricing: Pricing) -> Ranking | None:
        """The best plans; None: still searching, ask again at a later step.

        Raises what the search has raised.
        """
        key = hash((pricing.config, pricing.cluster, pricing.rates))
        if key in self._found:
            self._at_work.discard(key)
            found = self._found.pop(key)
            if isinstance(found, Exception):
                raise found
            return found
        if key not in self._at_work:
            self._at_work.add(key)
            threading.Thread(
                target=self._search, args=(key, pricing), name="search", daemon=True
            ).start()
        return None

    def _search(self, key: int, pricing: Pricing) -> None:
        try:
            self._found[key] = search_now(pricing)
        except PlanError:
            self._found[key] = Ranking(best=(), rejections=(), num_priced=0)
        except Exception as error:
            self._found[key] = error
