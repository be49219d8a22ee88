"""What `optimus plan` prints: tables of plans, of their terms, and of clusters."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from optimus_jax.cli.page_files import page_path, write_page
from optimus_jax.config.request import typed
from optimus_jax.config.run_checkpoint import INIT_FROM
from optimus_jax.planning.ahead_of_time.compile_check import CAVEATS, CompileReport
from optimus_jax.planning.api import PlanSearch, RankedPlan
from optimus_jax.planning.cluster_comparison import ComparedCluster
from optimus_jax.planning.cost.cost import hidden_shares
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.search.explain import (
    layout_settings,
    memory_rows,
    seconds,
    term_rows,
    whole_over_tensor,
)
from optimus_jax.planning.training_cost import TrainingCost, compact
from optimus_jax.report.plan_page import TEXT_COLUMNS, plan_page
from optimus_jax.run.command_line import PIPED_WIDTH, settings
from optimus_jax.system.command import typed_command
from optimus_jax.viz.frontier import PlanRecord
from optimus_jax.weights.published import MODEL
from optimus_jax.weights.published_adapters import PublishedAdapters

ALL_COLUMNS_WIDTH = 140
"""Least width of a table with all columns. In a narrower one the reasons follow below."""
SHOWN_SHARE = 0.03
"""Exchanges of a compiled plan are shown if they take this share of the step, without overlap."""
MOST_NAMED = 3
"""Rejected layouts that are named for each reason."""
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
"""Settings that the "train with:" line gives as the plan and the batch have them."""
RULES = "parallel.rules"
"""Setting that the plan may only add to."""
COSTS = ("time", "device-hours", "price", "MWh")
"""Columns of what training takes."""
LEFT_OUT = ("mesh", "step", "per device", "MFU", "GiB")
"""Columns that a narrow comparison has no room for beside COSTS; the mesh follows below."""
IN_NARROW = ("", "mesh", "m", "remat", "zero", "step", "tokens/s", "MFU", "GiB")
"""Columns of a narrow table."""


def make_console() -> Console:
    """Standard output, wide enough for all columns if it is not a terminal."""
    console = Console(markup=False, emoji=False)  # names and reasons are not rich's
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def empty_table(*, is_narrow: bool) -> Table:
    """A table, without vertical lines if it is narrow."""
    return Table(pad_edge=False, box=SIMPLE_HEAD if is_narrow else HEAVY_HEAD)


def compared_hidden(found: PlanSearch, ranked: RankedPlan, report: CompileReport) -> dict:
    """The shares of exchanges beside compute, as compiled and as the planner predicts them."""
    workload = Workload.of(found.config)
    return report.compare_hidden(hidden_shares(workload, ranked.plan, found.cluster, found.rates))


def show(
    given: dict,
    overrides: Mapping[str, Any],
    found: PlanSearch,
    reports: Sequence[CompileReport | None],
    training: TrainingCost | None,
) -> None:
    """Print the ranking as a table, with the model, batch and cluster that it is for.

    Args:
      given: the flags.
      overrides: the settings that they give, by dotted name.
      training: what training under plan 1 takes.
    """
    console = make_console()
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
    if any(reports):
        console.print(f"compiled, not run: {'; '.join(CAVEATS)}", highlight=False)
    is_narrow = console.width < ALL_COLUMNS_WIDTH
    console.print(plan_table(found.plans, reports, is_narrow=is_narrow))
    if is_narrow:
        for ranked in found.plans:
            console.print(f"plan {ranked.rank}: {ranked.why}", highlight=False)
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
    if training is not None:
        console.print(f"plan 1, {training.describe()}", highlight=False)
    said = layout_settings(best.plan)
    # the flags of plan 1 would fix its layout in every phase
    if any(later.plan != best.plan for later in found.later):
        layout = {
            name: value
            for name, value in overrides.items()
            if name in SAID_BY_FLAGS and name.startswith("parallel.")
        }
        console.print(
            "later phases need a layout other than plan 1, so the run chooses the settings that"
            " were not given:",
            highlight=False,
        )
        said = {"parallel.mesh": "auto"} | layout
    console.print(
        f"train with: {train_command(given, found, said)}", highlight=False, soft_wrap=True
    )


def train_command(given: dict, found: PlanSearch, layout: Mapping[str, Any]) -> str:
    """The command that trains under plan 1, as a shell reads it.

    Args:
      given: the flags.
      layout: the settings that give its layout.
    """
    config = found.config
    begin = INIT_FROM if PublishedAdapters.parse(given["model"], what=MODEL) else MODEL
    batch = {
        "precision.compute": found.plans[0].plan.precision,
        "data.seq_len": config.seq_len,
        "data.global_batch": config.data.global_batch,
        **({"data.phases": config.data.phases} if config.data.phases else {}),
        **({"cpu_devices": given["cpu_devices"]} if given.get("cpu_devices") else {}),
    }
    further = settings(
        {name: given[name] for name in ("init_from", "set") if name in given}, note=lambda _: None
    )
    said = {*SAID_BY_FLAGS, *layout} - {RULES}
    others = {name: value for name, value in further.items() if name not in said}
    if RULES in others and RULES in layout:
        others[RULES] = ",".join(dict.fromkeys([*others[RULES].split(","), *layout[RULES]]))
        layout = {name: value for name, value in layout.items() if name != RULES}
    model = shlex.join([begin, str(given["model"])])
    return f"{typed_command('train')} {model} {typed({**batch, **layout, **others})}"


def plan_table(
    plans: Sequence[RankedPlan], reports: Sequence[CompileReport | None], *, is_narrow: bool
) -> Table:
    """A row for each plan.

    Args:
      is_narrow: whether there is room for IN_NARROW alone.
    """
    table = empty_table(is_narrow=is_narrow)
    rows = [cells(ranked, is_narrow=is_narrow) for ranked in plans]
    names = [name for name in rows[0] if not is_narrow or name in IN_NARROW]
    for name in names:
        is_text = name in TEXT_COLUMNS
        table.add_column(
            name,
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=is_narrow and not is_text,
        )
    if any(reports):
        table.add_column("compiled GiB")
    for row, report in zip(rows, reports, strict=True):
        compiled = (
            [f"{report.total_bytes / 2**30:.1f} {'fits' if report.fits else 'TOO MUCH'}"]
            if report
            else []
        )
        table.add_row(*[row[name] for name in names], *compiled)
    return table


def cells(ranked: RankedPlan, *, is_narrow: bool = False) -> dict[str, str]:
    """The cells of a plan's row in the table, by column.

    Args:
      is_narrow: whether the mesh may be broken into lines, and has the schedule beside it.
    """
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
    mesh = f"{plan.axes}{whole}"
    if is_narrow:
        mesh = f"{mesh.replace(',', ' ')} {schedule}".strip()
    return {
        "": str(ranked.rank),
        "mesh": mesh,
        "schedule": schedule,
        "m": str(plan.microbatches),
        "remat": remat,
        "zero": str(plan.zero),
        "overlap": "" if plan.overlap == "none" else plan.overlap,
        "step": seconds(prediction.step_time_s),
        "90% within": f"{seconds(prediction.low_s)} - {seconds(prediction.high_s)}",
        "tokens/s": f"{prediction.tokens_per_s:,.0f}",
        "MFU": "?" if prediction.mfu is None else f"{prediction.mfu:.1%}",
        "GiB": f"{ranked.memory_bytes / 2**30:.1f}",
        "bubble": f"{prediction.bubble:.1%}",
        "comm.": f"{prediction.communication:.1%}",
        "why": ranked.why,
    }


def show_divisibility(found: PlanSearch) -> None:
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


def show_terms(ranked: RankedPlan) -> None:
    """Print the terms of a plan's time and memory."""
    console = make_console()
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
    for row in memory_rows(ranked.memory):
        memory.add_row(*row)
    console.print(memory)


def show_rejected(found: PlanSearch) -> None:
    """Print the layouts that are not legal or do not fit: those of the same reason together, the
    most frequent reason first, and at last those that are too large.
    """
    reasons: dict[str, dict[str, None]] = {}  # a mesh is rejected with each of its other settings
    for each in found.rejections:
        if each.needs_bytes is None:
            reasons.setdefault(each.reason, {})[each.layouts] = None
    for reason, layouts in sorted(reasons.items(), key=lambda item: -len(item[1])):
        _show_some(f"not, because {reason}:", list(layouts))
    too_large = [each for each in found.rejections if each.needs_bytes is not None]
    if too_large:
        too_large.sort(key=lambda each: each.needs_bytes or 0)
        lines = dict.fromkeys(f"{each.layouts}: {each.reason}" for each in too_large)
        _show_some("too large:", list(lines))
    print(
        f"of the {found.num_priced} legal layouts, those slower than the plans above were not"
        " checked for memory"
    )


def _show_some(title: str, lines: Sequence[str]) -> None:
    """Print a title, and the first lines below it."""
    print(title)
    for line in lines[:MOST_NAMED]:
        print(f"  {line}")
    if len(lines) > MOST_NAMED:
        print(f"  and {len(lines) - MOST_NAMED:,} more")


def show_comparison(
    compared: Sequence[ComparedCluster], trainings: Sequence[TrainingCost | None]
) -> None:
    """Print a row for each cluster, with its best plan.

    Args:
      trainings: what training on each cluster takes; None: no number of tokens is given, or there
        is no plan.
    """
    console = make_console()
    first = next(each.found for each in compared if each.found is not None)
    config = first.config
    console.print(
        f"{config.model.name}, {config.data.global_batch} x {config.seq_len} tokens,"
        f" {first.plans[0].plan.precision}: the best plan for each cluster; predicted, not"
        " measured",
        highlight=False,
    )
    is_narrow, has_costs = console.width < ALL_COLUMNS_WIDTH, any(trainings)
    names = ["cluster", "mesh", "step", "tokens/s", "per device", "MFU", "GiB"]
    names += COSTS if has_costs else []
    if all(each is None or each.price is None for each in trainings):
        names = [name for name in names if name != "price"]
    if is_narrow and has_costs:
        names = [name for name in names if name not in LEFT_OUT]
    table = empty_table(is_narrow=is_narrow)
    for name in names:
        is_text = name == "mesh"
        justify = "left" if name in ("cluster", "mesh") else "right"
        table.add_column(name, justify=justify, no_wrap=not is_text, overflow="fold")
    for each, training in zip(compared, trainings, strict=True):
        row = {"cluster": each.name, "mesh": "no plan"}
        if each.found is not None:
            best = each.found.plans[0]
            rate = best.prediction.tokens_per_s / each.found.cluster.num_devices
            row |= {**cells(best, is_narrow=True), "per device": f"{rate:,.0f}"}
            row["mesh"] += f" m={best.plan.microbatches}"
        if training is not None:
            row |= dict(zip(COSTS, training.cells(), strict=True))
        table.add_row(*[row.get(name, "") for name in names])
    console.print(table)
    for each in compared:
        if each.found is None:
            console.print(f"{each.name}: {each.why_not}", highlight=False)
        elif is_narrow and has_costs:
            best = cells(each.found.plans[0])
            console.print(
                f"{each.name}: {best['mesh']}, m={best['m']}, MFU {best['MFU']}, {best['GiB']} GiB",
                highlight=False,
            )
    if training := next((each for each in trainings if each is not None), None):
        console.print(
            f"to train on {compact(training.num_tokens)} tokens; energy: at most, of devices alone",
            highlight=False,
        )


def write_plan_page(file: str, found: Mapping[str, PlanSearch]) -> None:
    """Write the page of --html about the plans for each cluster.

    Raises ConfigError if that is not possible.
    """
    out = page_path(file, flag="--html")
    config = next(iter(found.values())).config
    memories = {each.cluster.accelerator.memory_bytes for each in found.values()}
    text = plan_page(
        {
            name: [cast(PlanRecord, ranked.as_json()) for ranked in each.plans]
            for name, each in found.items()
        },
        {name: [cells(ranked) for ranked in each.plans] for name, each in found.items()},
        title=f"Plans for {config.model.name}: {config.data.global_batch} x {config.seq_len}"
        " tokens",
        notes=[
            "Times and bytes are predictions; nothing was run. Of each mesh, rules and schedule"
            " only the fastest plan is here, with the least recomputing that fits.",
            *(
                f"{name}: {each.num_priced:,} legal layouts priced; rates: {each.rates.source}"
                for name, each in found.items()
            ),
        ],
        capacity_bytes=memories.pop() if len(memories) == 1 else None,
    )
    write_page(out, text, flag="--html")
    print(f"wrote {out}", file=sys.stderr)
