"""`optimus plan`: rank the layouts of a model on a cluster.

`optimus plan --model llama3-8b --cluster h100:8x8`
"""

import json
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from typing import TYPE_CHECKING

from optimus_jax.config.presets import MODEL_HELP
from optimus_jax.errors import ConfigError, explain
from optimus_jax.run.command_line import Parser, settings
from optimus_jax.system.command import typed_command
from optimus_jax.system.environment import import_jax

if TYPE_CHECKING:
    from optimus_jax.planning.ahead_of_time.compile_check import CompileReport
    from optimus_jax.planning.api import PlanSearch, RankedPlan
    from optimus_jax.planning.local_cluster import LocalCluster

PIPED_WIDTH = 160
"""Width of a table, in columns, if the output is not a terminal."""
SHOWN_SHARE = 0.03
"""Exchanges of a compiled plan are shown if they take this share of the step, without overlap."""
THIS_MACHINE = "here"
"""Value of --cluster for this machine's devices, which are measured."""
SAID_BY_FLAGS = (
    "parallel.mesh",
    "parallel.microbatches",
    "parallel.remat",
    "parallel.zero",
    "parallel.schedule",
    "parallel.repeats",
    "parallel.stage_residuals",
    "parallel.send_slack",
    "parallel.offload",
    "parallel.overlap",
    "parallel.kept_layers",
    "precision.compute",
    "data.seq_len",
    "data.global_batch",
    "data.phases",
)
"""Settings that the "train with:" line gives by flags of their own, without `--set`."""


def parser() -> Parser:
    """The parser of this command's flags.

    A flag without a default is in the parsed result only if it was given.
    """
    flags = Parser(
        description=(
            "Rank all layouts of a model on a cluster, without access to that cluster. Times and"
            " bytes are predictions."
        ),
        argument_default=SUPPRESS,
        words={"top": "top_k num_plans", "cluster": "hardware topology"},
    )
    flags.add_argument("--model", metavar="NAME", required=True, help=MODEL_HELP)
    flags.add_argument(
        "--init-from", metavar="DIR", help="adapters in PEFT's format, to be trained beside --model"
    )
    flags.add_argument(
        "--cluster",
        metavar="NAME:HOSTSxDEVICES",
        default=THIS_MACHINE,
        help=(
            "such as h100:8x8, or a100:4 for one host (default: this machine's devices, measured"
            " once)"
        ),
    )
    flags.add_argument(
        "--without",
        type=int,
        metavar="N",
        help="plan for N fewer hosts, or for N fewer devices if the cluster is one host",
    )
    flags.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="NAME=SPEED",
        help="speed of a link: intra_host=300GB/s, inter_host=400Gb/s,5us or host=50GB/s",
    )
    flags.add_argument(
        "--seq-len",
        metavar="N",
        help="tokens per example (default: the model's; of text at most 1024)",
    )
    flags.add_argument(
        "--global-batch",
        metavar="N",
        help="examples per step over all devices (default: 8 per device)",
    )
    flags.add_argument(
        "--phases",
        metavar="LIST",
        help="later batches, as for train: show what plan 1 becomes in each phase",
    )
    flags.add_argument(
        "--precision",
        metavar="NAME",
        help="f32, bf16, f16 (default: bf16, f16 on GPUs without it, f32 on a CPU)",
    )
    flags.add_argument(
        "--mesh", metavar="SIZES", help="only this mesh: data=2,pipe=4 (default: all)"
    )
    flags.add_argument(
        "--schedule", metavar="NAME", help="only this schedule (default: 1f1b and interleaved)"
    )
    flags.add_argument(
        "--microbatches", metavar="N", help="only this number (default: all that divide the batch)"
    )
    flags.add_argument(
        "--remat",
        metavar="NAME",
        help="only this policy (default: the least recomputing that fits)",
    )
    flags.add_argument("--zero", metavar="N", help="only this ZeRO stage (default: all)")
    flags.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting of a run"
    )
    flags.add_argument(
        "--top", type=int, default=10, metavar="N", help="plans to show (default: 10)"
    )
    flags.add_argument(
        "--explain",
        type=int,
        metavar="RANK",
        help="show the terms of this plan's time and memory",
    )
    flags.add_argument(
        "--rejected",
        action="store_true",
        default=False,
        help="list the layouts that are not legal or do not fit, and why",
    )
    flags.add_argument(
        "--compile",
        action="store_true",
        default=False,
        help="compile the plans for the cluster's GPUs (extra plan-gpu)",
    )
    flags.add_argument(
        "--profile",
        action="store_true",
        default=False,
        help="measure this machine's devices again",
    )
    flags.add_argument(
        "--cpu-devices", metavar="N", type=int, default=None, help="number of virtual CPU devices"
    )
    flags.add_argument(
        "--json", action="store_true", default=False, help="print JSON, best plan first"
    )
    return flags


def overrides(given: dict) -> dict:
    """The settings that the parsed flags give, by dotted name."""
    return settings(given, leave=("cpu_devices",))


def find(given: dict) -> "PlanSearch":
    """Search for plans as the flags say."""
    # After parsing, so that --help does not wait for JAX.
    import_jax(only_cpu=given["cluster"] != THIS_MACHINE)
    from optimus_jax.planning.api import search_plans

    if given["top"] < 1 or not 1 <= given.get("explain", 1) <= given["top"]:
        raise ConfigError(
            explain(
                "ranks count from 1 to --top",
                given=f"--top {given['top']}, --explain {given.get('explain', 1)}",
                do="give a rank that is shown",
            )
        )
    if given["json"] and ("explain" in given or given["rejected"]):
        raise ConfigError(
            explain(
                "--json prints every plan with all of its terms",
                given="--json with --explain or --rejected",
                do="leave one of them out",
            )
        )
    asked = {
        "top": given["top"],
        "links": given["link"],
        "overrides": overrides(given),
        "progress": show_pricing if sys.stderr.isatty() else None,
    }
    if given["cluster"] == THIS_MACHINE:
        if "without" in given:
            raise ConfigError(
                explain(
                    "--without needs a named cluster",
                    given=f"--without {given['without']}",
                    do=(
                        "name a cluster with --cluster, or hide devices: --cpu-devices N,"
                        " CUDA_VISIBLE_DEVICES"
                    ),
                )
            )
        here = measured_here(given)
        return search_plans(
            given["model"], here.cluster, rates=here.rates, calibration=here.calibration, **asked
        )
    if given["profile"] or given["cpu_devices"] is not None:
        raise ConfigError(
            explain(
                "only this machine's devices can be measured",
                given=f"--cluster {given['cluster']}",
                do="leave out --cluster, or --profile and --cpu-devices",
            )
        )
    return search_plans(given["model"], given["cluster"], without=given.get("without"), **asked)


def measured_here(given: dict) -> "LocalCluster":
    """This machine's devices as a cluster, with their measured rates."""
    from optimus_jax.devices.backend import unexpected_cpu_warning
    from optimus_jax.devices.cpu import use_cpu_devices
    from optimus_jax.mesh.build import discover
    from optimus_jax.planning.api import config_for
    from optimus_jax.planning.local_cluster import measure_devices
    from optimus_jax.planning.profiles.cluster import Cluster

    if given["cpu_devices"] is not None:
        if given["cpu_devices"] < 1:
            raise ConfigError(
                explain(
                    "--cpu-devices must be at least 1",
                    given=f"--cpu-devices {given['cpu_devices']}",
                    do="give 1 or more",
                )
            )
        use_cpu_devices(given["cpu_devices"])
    topology = discover()
    if (warning := unexpected_cpu_warning()) is not None:
        print(warning, file=sys.stderr, flush=True)
    # report a wrong setting before minutes of measuring
    config_for(given["model"], Cluster.of(topology).with_links(given["link"]), overrides(given))
    return measure_devices(
        topology, refresh=given["profile"], progress=show_progress if sys.stderr.isatty() else None
    )


def show_progress(text: str, share: float) -> None:
    """Show the progress of measuring on one line of the terminal, which is overwritten."""
    print(
        f"\r\x1b[Kmeasuring this machine: {share:4.0%} {text}"[:100],
        end="" if share < 1 else "\n",
        file=sys.stderr,
        flush=True,
    )


def show_pricing(text: str) -> None:
    """Show the progress of the search on one line, which the next output overwrites."""
    print(f"\r\x1b[K{text}"[:100], end="\r", file=sys.stderr, flush=True)


def compiled(found: "PlanSearch") -> "list[CompileReport | None]":
    """Compile every plan that was found. Returns a report for each."""
    from optimus_jax.planning.ahead_of_time.compile_check import check

    reports: list[CompileReport | None] = []
    for ranked in found.plans:
        print(f"compiling plan {ranked.rank} of {len(found.plans)}", file=sys.stderr, flush=True)
        reports.append(check(found.config, ranked.plan, found.cluster))
    return reports


def compared_hidden(found: "PlanSearch", ranked: "RankedPlan", report: "CompileReport") -> dict:
    """The shares of exchanges beside compute, as compiled and as the planner predicts them."""
    from optimus_jax.planning.cost.cost import hidden_shares
    from optimus_jax.planning.cost.workload import Workload

    workload = Workload.of(found.config)
    return report.compare_hidden(hidden_shares(workload, ranked.plan, found.cluster, found.rates))


def show(given: dict, found: "PlanSearch", reports: "Sequence[CompileReport | None]") -> None:
    """Print the ranking as a table, with the model, batch and cluster that it is for."""
    from rich.console import Console
    from rich.table import Table

    from optimus_jax.planning.search.explain import flags

    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    config, best = found.config, found.plans[0]
    console.print(
        f"{config.model.name}, {config.data.global_batch} x {config.seq_len} tokens,"
        f" {best.plan.precision}, on {found.cluster}",
        highlight=False,
    )
    console.print(
        f"{found.num_priced} legal layouts priced; predicted, not measured; rates:"
        f" {found.rates.source}",
        highlight=False,
    )
    table = Table(show_lines=False, pad_edge=False)
    for name in (
        "",
        "mesh",
        "schedule",
        "m",
        "remat",
        "zero",
        "overlap",
        "step",
        "90% within",
        "tokens/s",
        "MFU",
        "GiB",
        "bubble",
        "comm.",
        "why",
    ):
        table.add_column(
            name,
            justify="left" if name in ("mesh", "schedule", "remat", "overlap", "why") else "right",
            overflow="fold",
        )
    if any(reports):
        table.add_column("compiled GiB")
        from optimus_jax.planning.ahead_of_time.compile_check import CAVEATS

        console.print(f"compiled, not run: {'; '.join(CAVEATS)}", highlight=False)
    for ranked, report in zip(found.plans, reports, strict=True):
        table.add_row(
            *cells(ranked),
            *(
                [f"{report.total_bytes / 2**30:.1f} {'fits' if report.fits else 'TOO MUCH'}"]
                if report
                else []
            ),
        )
    console.print(table)
    for ranked, report in zip(found.plans, reports, strict=True):
        if report:
            shares = ", ".join(
                f"{name} {each['compiled']:.0%}"
                + ("" if each["planned"] is None else f" (planned {each['planned']:.0%})")
                for name, each in compared_hidden(found, ranked, report).items()
                if each["time_s"] >= SHOWN_SHARE * ranked.prediction.step_time_s
            )
            if shares:
                console.print(f"plan {ranked.rank} hides: {shares}", highlight=False)
    if found.cluster.num_hosts > 1:
        console.print(
            f"plan 1: {found.cluster.topology().describe_crossed(best.axes)}", highlight=False
        )
    for later in found.later:
        console.print(f"later: {later.describe()}", highlight=False, soft_wrap=True)
    show_divisibility(found)
    device = (
        f" --precision {best.plan.precision} --seq-len {config.seq_len} --global-batch"
        f" {config.data.global_batch}"
    )
    device += f" --phases {','.join(map(str, config.data.phases))}" if config.data.phases else ""
    said = flags(best.plan)
    # the flags of plan 1 would fix its layout in every phase
    if any(later.plan != best.plan for later in found.later):
        from optimus_jax.config.request import typed

        layout = {
            name: value
            for name, value in overrides(given).items()
            if name in SAID_BY_FLAGS and name.startswith("parallel.")
        }
        console.print(
            "later phases need a layout other than plan 1, so the run chooses the settings that"
            " were not given:",
            highlight=False,
        )
        said = typed({"parallel.mesh": "auto"} | layout)
    from optimus_jax.config.run_checkpoint import INIT_FROM
    from optimus_jax.weights.published import MODEL
    from optimus_jax.weights.published_adapters import PublishedAdapters

    begin = INIT_FROM if PublishedAdapters.parse(given["model"], what=MODEL) else MODEL
    further = settings(
        {name: given[name] for name in ("init_from", "set") if name in given}, note=lambda _: None
    )
    others = "".join(
        f" --set {name}={value}"
        for name, value in further.items()
        if name not in SAID_BY_FLAGS and f"--set {name}={value}" not in said
    )
    console.print(
        f"train with: {typed_command('train')} {begin} {given['model']}{device} {said}{others}",
        highlight=False,
        soft_wrap=True,
    )


def show_divisibility(found: "PlanSearch") -> None:
    """Print what the devices left out cost, and nearby batch sizes and device counts that divide
    better.
    """
    said, batch = found.divisibility, found.config.data.global_batch
    if found.lost is not None:
        print(found.lost.describe())
    if said.is_worth_reporting:
        print(f"note: {'; '.join(said.reasons)}.")
        for other in said.batches:
            print(
                f"  --global-batch {other.global_batch} ({other.global_batch / batch - 1:+.1%}):"
                f" {other.describe()}"
            )
        if said.no_batch is not None:
            print(f"  {said.no_batch}")
        for other in said.clusters:
            print(
                f"  the same batch on {other.num_devices:,} devices,"
                f" {found.cluster.num_devices - other.num_devices:,} left idle: {other.describe()}"
            )


def cells(ranked: "RankedPlan") -> list[str]:
    """The cells of a plan's row in the table."""
    from optimus_jax.planning.search.explain import seconds, whole_over_tensor

    plan, prediction = ranked.plan, ranked.prediction
    pipeline = plan.pipeline
    schedule = (
        ""
        if pipeline is None
        else pipeline.schedule + (f" x{pipeline.repeats}" if pipeline.repeats > 1 else "")
    )
    whole = "".join(f", {name} whole" for name in whole_over_tensor(plan))
    remat = (
        plan.remat
        + (f" but for {plan.kept_layers}" if plan.kept_layers else "")
        + ("" if pipeline is None or pipeline.keep_residuals else ", stage")
        + ("" if plan.offload == "none" else f", {plan.offload} on host")
    )
    return [
        str(ranked.rank),
        f"{plan.axes}{whole}",
        schedule,
        str(plan.microbatches),
        remat,
        str(plan.zero),
        "" if plan.overlap == "none" else plan.overlap,
        seconds(prediction.step_time_s),
        f"{seconds(prediction.low_s)} - {seconds(prediction.high_s)}",
        f"{prediction.tokens_per_s:,.0f}",
        "?" if prediction.mfu is None else f"{prediction.mfu:.1%}",
        f"{ranked.memory_bytes / 2**30:.1f}",
        f"{prediction.bubble:.1%}",
        f"{prediction.communication:.1%}",
        ranked.why,
    ]


def show_terms(ranked: "RankedPlan") -> None:
    """Print the terms of a plan's time and memory."""
    import dataclasses

    from rich.console import Console
    from rich.table import Table

    from optimus_jax.planning.search.explain import gib, term_rows

    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    table = Table(
        "term",
        "time",
        "share",
        "how",
        title=f"plan {ranked.rank}: {ranked.plan.describe()}",
        title_justify="left",
    )
    for row in term_rows(ranked.prediction):
        table.add_row(*row)
    console.print(table)
    memory = Table("memory of a device", "")
    for name, num_bytes in dataclasses.asdict(ranked.memory).items():
        memory.add_row(name, gib(num_bytes))
    memory.add_row("total", gib(ranked.memory_bytes))
    console.print(memory)


def main() -> None:
    given = parser().read()
    found = find(given)
    if given.get("explain", 1) > len(found.plans):
        raise ConfigError(
            explain(
                "there is no plan of this rank",
                given=f"--explain {given['explain']}, {len(found.plans)} found",
                do=f"give a rank from 1 to {len(found.plans)}",
            )
        )
    reports = compiled(found) if given["compile"] else [None] * len(found.plans)
    if given["json"]:
        print(
            json.dumps(
                [
                    ranked.as_json()
                    | (
                        {
                            "compiled_bytes": report.total_bytes,
                            "compiled_fits": report.fits,
                            "hidden": compared_hidden(found, ranked, report),
                        }
                        if report
                        else {}
                    )
                    for ranked, report in zip(found.plans, reports, strict=True)
                ],
                indent=2,
            )
        )
        return
    show(given, found, reports)
    if (rank := given.get("explain")) is not None:
        show_terms(found.plans[rank - 1])
    if given["rejected"]:
        for rejection in found.rejections:
            print(f"not {rejection.layouts}: {rejection.reason}")
        print(
            f"of the {found.num_priced} legal layouts, those slower than the plans above were not"
            " checked for memory"
        )
