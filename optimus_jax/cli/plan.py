"""`optimus plan`: rank the layouts of a model on a cluster.

`optimus plan --model llama3-8b --cluster h100:8x8`
"""

import json
import sys
from argparse import SUPPRESS
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from optimus_jax.cli.page_files import page_path
from optimus_jax.cli.this_machine import THIS_MACHINE, measured_here
from optimus_jax.config.presets import MODEL_HELP
from optimus_jax.errors import ConfigError, explain
from optimus_jax.report.page import check_page_packages
from optimus_jax.run.command_line import Parser, settings
from optimus_jax.system.environment import import_jax

if TYPE_CHECKING:
    from optimus_jax.planning.ahead_of_time.compile_check import CompileReport
    from optimus_jax.planning.api import PlanSearch
    from optimus_jax.planning.training_cost import TrainingCost

PLANS_ON_PAGE = 200
"""Plans on the page of --html, if there are so many."""
TOP = 10
"""Plans to show."""


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
        words={
            "top": "top_k num_plans",
            "cluster": "hardware topology",
            "tokens": "num_tokens train_tokens total_tokens",
            "price": "price_per_hour cost_per_hour",
        },
    )
    flags.add_argument("--model", metavar="NAME", required=True, help=MODEL_HELP)
    flags.add_argument(
        "--init-from",
        metavar="DIR",
        help="adapters in PEFT's format, to be trained beside --model (default: none)",
    )
    flags.add_argument(
        "--cluster",
        metavar="NAME:HOSTSxDEVICES",
        default=THIS_MACHINE,
        help="such as h100:8x8, or a100:4 for one host (default: this machine, measured once)",
    )
    flags.add_argument(
        "--compare",
        nargs="+",
        metavar="CLUSTER",
        help="the best plan for each of these clusters, same batch (default: plans for --cluster)",
    )
    flags.add_argument(
        "--tokens",
        metavar="N",
        help="show what training on so many takes: 15T, 300B; the last of --phases has what the"
        " others leave (default: not shown)",
    )
    flags.add_argument(
        "--price",
        nargs="+",
        metavar="X",
        help="with --tokens: price of a device-hour, 2.50, or h100=2.50 h200=3.20 (default: none)",
    )
    flags.add_argument(
        "--without",
        type=int,
        metavar="N",
        help="plan for N fewer hosts, or N fewer devices if the cluster is one host (default: 0)",
    )
    flags.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="NAME=SPEED",
        help="speed of a link: intra_host=300GB/s, inter_host=400Gb/s,5us or host=50GB/s (default:"
        " the usual one)",
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
        help="later batches, as for train: what plan 1 becomes in each phase (default: none)",
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
    flags.add_argument("--top", type=int, metavar="N", help=f"plans to show (default: {TOP})")
    flags.add_argument(
        "--explain",
        type=int,
        metavar="RANK",
        help="show the terms of this plan's time and memory (default: of none)",
    )
    flags.add_argument(
        "--rejected",
        action="store_true",
        default=False,
        help="show why other layouts are not legal or do not fit (default: show plans alone)",
    )
    flags.add_argument(
        "--compile",
        action="store_true",
        default=False,
        help="compile the plans for the cluster's GPUs, extra plan-gpu (default: predict)",
    )
    flags.add_argument(
        "--measure",
        action="store_true",
        default=False,
        help="measure this machine's devices again (default: what was measured before)",
    )
    flags.add_argument(
        "--cpu-devices",
        metavar="N",
        type=int,
        default=None,
        help="number of virtual CPU devices (default: the devices that JAX finds)",
    )
    flags.add_argument(
        "--html",
        metavar="FILE.html",
        help="write a page with an interactive chart of step time against memory (default: none)",
    )
    flags.add_argument(
        "--json",
        action="store_true",
        default=False,
        help="print JSON, best plan first (default: a table)",
    )
    return flags


def overrides(given: dict) -> dict:
    """The settings that the parsed flags give, by dotted name."""
    return settings(given, leave=("cpu_devices", "measure"))


def find(given: dict) -> "PlanSearch":
    """Search for plans as the flags say."""
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
        "top": max(given["top"], PLANS_ON_PAGE) if "html" in given else given["top"],
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
        from optimus_jax.planning.api import config_for
        from optimus_jax.planning.profiles.cluster import Cluster

        # A wrong setting is reported before minutes of measuring.
        here = measured_here(
            given["cpu_devices"],
            refresh=given["measure"],
            check=lambda topology: config_for(
                given["model"], Cluster.of(topology).with_links(given["link"]), overrides(given)
            ),
        )
        return search_plans(given["model"], here, **asked)
    if given["measure"] or given["cpu_devices"] is not None:
        raise ConfigError(
            explain(
                "only this machine's devices can be measured",
                given=f"--cluster {given['cluster']}",
                do="leave out --cluster, or --measure and --cpu-devices",
            )
        )
    return search_plans(given["model"], given["cluster"], without=given.get("without"), **asked)


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


def check_flags(given: dict) -> None:
    """Raise ConfigError for flags that have no use together, or a page that cannot be written."""
    if "html" in given:
        page_path(given["html"], flag="--html")
        check_page_packages()
    if "price" in given and "tokens" not in given:
        raise ConfigError(
            explain(
                "a price per hour needs a number of tokens to train on",
                given=f"--price {' '.join(given['price'])}",
                do="add --tokens N, such as 300B",
            )
        )
    if "compare" not in given:
        return
    others = [
        f"--{name.replace('_', '-')}"
        for name in ("without", "top", "explain", "rejected", "compile", "measure", "cpu_devices")
        if given.get(name)
    ]
    if given["cluster"] != THIS_MACHINE:
        others.append("--cluster")
    if others:
        raise ConfigError(
            explain(
                "a comparison is of the best plans for whole clusters",
                given=f"--compare with {', '.join(others)}",
                do="leave one of them out",
            )
        )


def compare(given: dict) -> None:
    """Print the best plan for each cluster of a comparison."""
    import_jax(only_cpu=True)
    from optimus_jax.cli.plan_output import show_comparison, write_plan_page
    from optimus_jax.planning.cluster_comparison import compare_clusters

    takes = training_costs(given)
    compared = compare_clusters(
        given["model"],
        given["compare"],
        links=given["link"],
        top=PLANS_ON_PAGE if "html" in given else 1,
        progress=show_pricing if sys.stderr.isatty() else None,
        overrides=overrides(given),
    )
    trainings = [each.found and takes(each.found) for each in compared]
    if "html" in given:
        write_plan_page(given["html"], {each.name: each.found for each in compared if each.found})
    if not given["json"]:
        show_comparison(compared, trainings)
        return
    entries = [
        {"cluster": each.name}
        | ({"why_not": each.why_not} if each.found is None else each.found.plans[0].as_json())
        | ({} if training is None else {"training": training.as_json()})
        for each, training in zip(compared, trainings, strict=True)
    ]
    print(json.dumps(entries, indent=2))


def training_costs(given: dict) -> "Callable[[PlanSearch], TrainingCost | None]":
    """What training under the best plan of a search takes, as the flags say; None: they do not ask.

    Raises ConfigError if a number of tokens or a price cannot be read.
    """
    from optimus_jax.planning.profiles.cluster import Cluster
    from optimus_jax.planning.training_cost import (
        TrainingCost,
        check_planned_for,
        parse_prices,
        parse_tokens,
        price_of,
    )

    prices = parse_prices(given.get("price", ()))
    planned = given.get("compare") or [given["cluster"]]
    if THIS_MACHINE not in planned:
        check_planned_for(prices, map(Cluster.parse, planned))
    num_tokens = parse_tokens(given["tokens"]) if "tokens" in given else None

    def of(found: "PlanSearch") -> TrainingCost | None:
        if num_tokens is None:
            return None
        cluster = found.cluster
        if THIS_MACHINE in planned:  # known only now
            check_planned_for(prices, [cluster])
        prediction = found.plans[0].prediction
        return TrainingCost.of(
            num_tokens,
            prediction,
            cluster,
            price_of(prices, cluster),
            later=later_rates(found),
        )

    return of


def later_rates(found: "PlanSearch") -> list[tuple[float, float]]:
    """Of each later phase, the tokens before it and its tokens per second."""
    from optimus_jax.config.phases import phases_of

    rates, tokens = [], 0.0
    for before, later in zip(phases_of(found.config), found.later, strict=False):
        steps = later.phase.steps_before - before.steps_before
        tokens += steps * before.global_batch * before.seq_len
        rates.append((tokens, later.tokens_per_s))
    return rates


def main() -> None:
    given = parser().read()
    check_flags(given)
    if "compare" in given:
        compare(given)
        return
    given.setdefault("top", TOP)
    # After parsing, so that --help does not wait for JAX.
    import_jax(only_cpu=given["cluster"] != THIS_MACHINE)
    takes = training_costs(given)
    found = find(given)
    if "html" in given:
        from optimus_jax.cli.plan_output import write_plan_page

        write_plan_page(given["html"], {str(found.cluster): found})
        found = replace(found, plans=found.plans[: given["top"]])
    if given.get("explain", 1) > len(found.plans):
        raise ConfigError(
            explain(
                "there is no plan of this rank",
                given=f"--explain {given['explain']}, {len(found.plans)} found",
                do=f"give a rank from 1 to {len(found.plans)}",
            )
        )
    from optimus_jax.cli.plan_output import compared_hidden, show, show_rejected, show_terms

    reports = compiled(found) if given["compile"] else [None] * len(found.plans)
    training = takes(found)
    if given["json"]:
        entries = [
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
        ]
        if training is not None:
            entries[0]["training"] = training.as_json()
        print(json.dumps(entries, indent=2))
        return
    show(given, overrides(given), found, reports, training)
    if (rank := given.get("explain")) is not None:
        show_terms(found.plans[rank - 1])
    if given["rejected"]:
        show_rejected(found)
