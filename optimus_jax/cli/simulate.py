"""`optimus simulate`: try the controller on a simulated cluster.

`optimus simulate --scenario link-quarter --cluster h100:8x8 --model gpt2-xl`
"""

import json
from argparse import SUPPRESS
from typing import TYPE_CHECKING

from optimus_jax.cli.this_machine import THIS_MACHINE, measured_here
from optimus_jax.config.data import SEQUENCES_PER_DEVICE
from optimus_jax.config.presets import MODEL_HELP
from optimus_jax.errors import ConfigError, explain
from optimus_jax.run.command_line import PIPED_WIDTH, Parser, settings
from optimus_jax.system.environment import import_jax
from optimus_jax.system.resilient_io import print_to_stderr

if TYPE_CHECKING:
    from optimus_jax.planning.cost.rates import Rates
    from optimus_jax.planning.learning.calibrate import Calibration
    from optimus_jax.planning.profiles.cluster import Cluster
    from optimus_jax.simulation.comparison import Estimate, Row
    from optimus_jax.simulation.outcome import Outcome
    from optimus_jax.simulation.replay import Recording
    from optimus_jax.simulation.scenarios import Scenario
    from optimus_jax.simulation.setup import Setup
CLUSTER = "h100:8x8"
"""Default of --cluster, unless the replayed run was on virtual devices."""
SCENARIO, SIMULATED_MODEL = "link-quarter", "gpt2-xl"
"""Defaults of --scenario and --model, unless a run is replayed."""


def parser() -> Parser:
    """The parser of this command's flags.

    A flag without a default is in the parsed result only if it was given.
    """
    flags = Parser(
        description=(
            "Compare the controller with other policies on a simulated cluster. All figures are"
            " simulated."
        ),
        argument_default=SUPPRESS,
    )
    flags.add_argument(
        "--scenario",
        metavar="NAME|random:SEED|FILE.json",
        help=(
            "what happens to the cluster; --list names all, and random:17 draws one"
            f" (default: {SCENARIO})"
        ),
    )
    flags.add_argument(
        "--model",
        metavar="NAME",
        help=f"{MODEL_HELP} (default: {SIMULATED_MODEL})",
    )
    flags.add_argument(
        "--cluster",
        metavar="NAME:HOSTSxDEVICES",
        help=(
            f"up to 1,024 devices, or here: this machine's (default: {CLUSTER}; here to replay a"
            " run on virtual devices)"
        ),
    )
    flags.add_argument(
        "--link",
        action="append",
        metavar="NAME=SPEED",
        help="speed of a link: intra_host=300GB/s or inter_host=400Gb/s,5us (default: the usual"
        " one)",
    )
    flags.add_argument(
        "--seq-len",
        metavar="N",
        help="tokens per example (default: the scenario's, or the model's; of text at most 1024)",
    )
    flags.add_argument(
        "--global-batch",
        metavar="N",
        help=(
            "examples per step over all devices (default: the scenario's, or"
            f" {SEQUENCES_PER_DEVICE} per device)"
        ),
    )
    flags.add_argument(
        "--precision",
        metavar="NAME",
        help="f32, bf16, f16 (default: bf16, f16 on GPUs without it, f32 on a CPU)",
    )
    flags.add_argument(
        "--cpu-devices",
        metavar="N",
        type=int,
        help="with --cluster here: number of virtual CPU devices (default: the replayed run's)",
    )
    flags.add_argument(
        "--seeds",
        type=int,
        default=10,
        metavar="N",
        help="number of runs, each with its own random draws (default: 10)",
    )
    flags.add_argument(
        "--policy",
        metavar="NAME",
        action="append",
        help="compare only this policy; may be given several times (default: all)",
    )
    flags.add_argument(
        "--replay",
        metavar="RUN_DIR",
        help="replay the conditions of a recorded run (default: simulate --scenario)",
    )
    flags.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other setting of a run, such as controller.budget_share=0.1",
    )
    flags.add_argument(
        "--list",
        action="store_true",
        default=False,
        help="name all scenarios (default: simulate one)",
    )
    flags.add_argument(
        "--show",
        action="store_true",
        default=False,
        help="print the scenario as JSON with every field, to edit it (default: simulate it)",
    )
    flags.add_argument(
        "--events",
        action="store_true",
        default=False,
        help="print every switch of the first seed, and why (default: none)",
    )
    flags.add_argument(
        "--json", action="store_true", default=False, help="print JSON (default: a table)"
    )
    return flags


def scenario_of(given: dict) -> "tuple[Scenario, Recording | None]":
    """The scenario: by name, from a file, or from a recorded run (then with the recording)."""
    from optimus_jax.run.stored_run import run_to_read
    from optimus_jax.simulation.named_scenarios import find_scenario
    from optimus_jax.simulation.replay import recorded

    if "replay" in given:
        recording = recorded(
            run_to_read(given["replay"], what="--replay", checkpoint="none", say=print_to_stderr)
        )
        return recording.scenario, recording
    return find_scenario(given.get("scenario", SCENARIO)), None


def check_flags(given: dict) -> None:
    """Raise ConfigError for flags that have no use together."""
    replaced = [f"--{name}" for name in ("scenario", "model") if name in given]
    if "replay" in given and replaced:
        raise ConfigError(
            explain(
                "a replayed run has its own model, and its own conditions",
                given=f"--replay with {', '.join(replaced)}",
                do="leave one of them out",
            )
        )
    is_here = given.get("cluster") == THIS_MACHINE
    if is_here and "link" in given:
        raise ConfigError(
            explain(
                "the links of this machine are measured",
                given=f"--cluster {THIS_MACHINE} --link {' '.join(given['link'])}",
                do="leave out --link, or name a cluster",
            )
        )
    if "cpu_devices" in given and not is_here and ("cluster" in given or "replay" not in given):
        raise ConfigError(
            explain(
                "only this machine has virtual devices",
                given=f"--cpu-devices {given['cpu_devices']}, --cluster"
                f" {given.get('cluster', CLUSTER)}",
                do=f"add --cluster {THIS_MACHINE}, or leave out --cpu-devices",
            )
        )


def with_cluster(given: dict, recording: "Recording | None") -> dict:
    """The flags with a default for the cluster.

    A recorded run on virtual devices is replayed on the same number of virtual devices.
    """
    virtual = None if recording is None else recording.config.cpu_devices
    given = {"cluster": CLUSTER if virtual is None else THIS_MACHINE} | given
    return (
        given
        if virtual is None or given["cluster"] != THIS_MACHINE
        else {"cpu_devices": virtual} | given
    )


def setup_of(given: dict, scenario: "Scenario", recording: "Recording | None") -> "Setup":
    """The scenario on the chosen cluster, with the model of the flags or of the recorded run."""
    from optimus_jax.config.request import make_config
    from optimus_jax.planning.search.search import Pricing
    from optimus_jax.simulation.setup import Setup
    from optimus_jax.weights.published_adapters import model_with_adapters

    cluster, rates, calibration = hardware(given)
    usual = {"data.global_batch": SEQUENCES_PER_DEVICE * cluster.num_devices}
    overrides = ({} if recording else usual) | settings(given, leave=("cpu_devices",))
    # Flags override what the scenario says about its first phase.
    import dataclasses

    said = {name: None for name in ("seq_len", "global_batch") if name in given}
    config = (
        make_config(model_with_adapters(given.get("model", SIMULATED_MODEL)), overrides)
        if recording is None
        else recording.config.with_values(overrides)
    )
    return Setup.of(
        dataclasses.replace(scenario, **said),
        Pricing(config, cluster, rates, calibration),
        start=recording and recording.start,
    )


def hardware(given: dict) -> "tuple[Cluster, Rates, Calibration]":
    """The cluster, its rates and its calibration."""
    from optimus_jax.planning.cost.rates import Rates
    from optimus_jax.planning.learning.calibrate import Calibration
    from optimus_jax.planning.profiles.cluster import Cluster

    if given["cluster"] != THIS_MACHINE:
        cluster = Cluster.parse(given["cluster"], given.get("link", ()))
        return cluster, Rates.of(cluster.accelerator), Calibration()
    here = measured_here(given.get("cpu_devices"))
    return here.cluster, here.rates, here.calibration


def methods_of(given: dict) -> tuple[str, ...]:
    """The requested policies, and the baselines that they are compared with.

    Raises ConfigError for an unknown policy.
    """
    from optimus_jax.errors import nearest
    from optimus_jax.simulation.comparison import BEST_STATIC, DEFAULT_STATIC, METHODS, ORACLE, STAY

    asked = given.get("policy", METHODS)
    for name in asked:
        if name not in METHODS:
            raise ConfigError(
                explain(
                    f"unknown policy {name!r}", given=f"--policy {name}", do=nearest(name, METHODS)
                )
            )
    return tuple(
        name for name in METHODS if name in (*asked, STAY, DEFAULT_STATIC, BEST_STATIC, ORACLE)
    )


def show(given: dict, setup: "Setup", table_rows: "list[Row]") -> None:
    """Print the table of results, with the scenario, model and cluster that it is for."""
    from rich.console import Console
    from rich.table import Table

    console, scenario, pricing = Console(), setup.scenario, setup.assumed[0]
    config = pricing.config
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(f"SIMULATED, not measured: {scenario.name}. {scenario.about}", highlight=False)
    console.print(
        f"{config.model.name}, {config.data.global_batch} x {config.seq_len} tokens"
        f" at first, {setup.num_steps} steps, on {pricing.cluster}",
        highlight=False,
    )
    first = (
        f"tries {len(setup.tried)} plans, first {setup.start.describe()}, and starts with the"
        " fastest"
        if len(setup.tried) > 1
        else f"starts with {setup.start.describe()}"
    )
    console.print(f"{first}; {given['seeds']} seeds, 95% intervals", highlight=False)
    table = Table(pad_edge=False)
    for name in (
        "",
        "time, s",
        "less than default",
        "of the oracle's gain",
        "over best static",
        "switches",
        "most",
        "taken back",
        "restarts",
    ):
        table.add_column(name, justify="left" if not name else "right")
    for row in table_rows:
        table.add_row(
            row.method,
            figure(row.total_s, "{:,.0f}"),
            figure(row.saved, "{:.1%}"),
            figure(row.share, "{:.0%}"),
            figure(row.regret, "{:+.1%}"),
            f"{row.switches:.1f}",
            str(row.most_switches),
            f"{row.rollbacks:.1f}",
            f"{row.restarts:.1f}",
        )
    console.print(table)


def figure(value: "Estimate | None", shape: str) -> str:
    """A figure with its 95% interval; empty if there is none."""
    return (
        ""
        if value is None
        else f"{shape.format(value.value)} [{shape.format(value.low)}, {shape.format(value.high)}]"
    )


def show_events(outcomes: "dict[str, Outcome]") -> None:
    """Print every switch of each policy in one run."""
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome.total_s:,.0f} s")
        for run_event in outcome.run_events:
            delays = ", ".join(
                f"{phase} {time_s:.1f}" for phase, time_s in run_event.delay_s.items()
            )
            print(
                f"  {run_event.time_s:8,.0f} s, step {run_event.step:5d}: {run_event.kind}"
                f" {run_event.plan.describe()} ({delays} s): {run_event.why}"
            )


def main() -> None:
    given = parser().read()
    check_flags(given)
    # After parsing, so that --help does not wait for JAX. What a replay has here are CPU devices.
    import_jax(only_cpu=given.get("cluster", CLUSTER) != THIS_MACHINE)
    from rich.console import Console
    from rich.progress import track

    from optimus_jax.simulation.candidate_plans import PooledSearch
    from optimus_jax.simulation.comparison import rows, run_all
    from optimus_jax.simulation.named_scenarios import library
    from optimus_jax.simulation.setup import check_seeds

    if given["list"]:
        for scenario in library().values():
            print(f"{scenario.name:27} {scenario.about}")
        return
    scenario, recording = scenario_of(given)
    given = with_cluster(given, recording)
    if given["show"]:
        print(scenario.to_json(), end="")
        return
    check_seeds(given["seeds"])
    setup, methods, searcher = (
        setup_of(given, scenario, recording),
        methods_of(given),
        PooledSearch(),
    )
    # The progress bar goes to standard error, and appears only on a terminal.
    runs = [
        run_all(setup, seed, searcher, methods)
        for seed in track(
            range(given["seeds"]), "seeds", console=Console(stderr=True), transient=True
        )
    ]
    if given["json"]:
        print(
            json.dumps(
                {
                    "simulated": True,
                    "scenario": scenario.name,
                    "cluster": given["cluster"],
                    "model": setup.assumed[0].config.model.name,
                    "steps": setup.num_steps,
                    "start": setup.start.describe(),
                    "tried": [plan.describe() for plan in setup.tried],
                    "seeds": given["seeds"],
                    "methods": [row.as_json() for row in rows(runs)],
                    "runs": [
                        {name: outcome.as_json() for name, outcome in each.items()} for each in runs
                    ],
                },
                indent=2,
            )
        )
        return
    show(given, setup, rows(runs))
    if given["events"]:
        show_events(runs[0])
