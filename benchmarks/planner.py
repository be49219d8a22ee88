"""Accuracy of the planner's time model on measured steps.

    python benchmarks/planner.py --vtrain DIR              # DIR has vTrain's CSV files
    python benchmarks/planner.py --fit A.csv --test B.csv  # fit to some files, predict others
    python benchmarks/planner.py --published               # the rows of published.json
    python benchmarks/planner.py --ranks                   # 2 minutes
    ... --json                                             # every figure as JSON

--vtrain leaves out whole models, widths and numbers of nodes, fits to the rest and predicts them,
with and without corrections. --published compares with layouts and throughputs that others have
published. --ranks shows where published layouts come in this project's own ranking.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from published import published_report, rank_report, read, scaling_report, terms_report
from published_comparisons import comparison_report
from vtrain import DEVICES_PER_HOST, ONE_NODE, SEVERAL_NODES, Row, Rows, start

from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.learning.fit import FITTED, Sample, fit_rates
from optimus_jax.system.paths import path_argument

TARGETS = {
    "mape": "0.08 on one node, 0.10 on several",
    "spearman_mean": 0.85,
    "top1_regret": 0.03,
    "top3_regret": 0.01,
}
"""Targets with whole models left out."""

Asked = list[tuple[Row, float, bool]]
"""Rows with their predicted time, and whether the measured time lies in its interval."""


def ask(rates: Rates, rows: Rows) -> Asked:
    """Predict every row."""
    predictions = [sample.predicted(rates) for sample in rows.samples]
    return [
        (row, p.step_time_s, p.low_s <= row.step_time_s <= p.high_s)
        for row, p in zip(rows.rows, predictions, strict=True)
    ]


Fits = list[tuple[Rates, Rows]]
"""Rates, and the rows that were left out when they were fitted."""


def left_out(rows: Rows, kind: Callable[[Row], Hashable], also: Sequence[Sample] = ()) -> Fits:
    """For each kind of row, rates fitted to all other kinds and to the samples `also`."""
    fits: Fits = []
    for each in dict.fromkeys(map(kind, rows.rows)):
        others = [
            sample for row, sample in zip(rows.rows, rows.samples, strict=True) if kind(row) != each
        ]
        fits.append(
            (
                fit_rates([*others, *also], start()),
                rows.where(lambda row, each=each: kind(row) == each),
            )
        )
    return fits


def ask_each(fits: Fits, *, corrected: bool = True) -> Asked:
    """Predict the rows of every fit, with its corrections by shape or with its rates only."""
    return [
        answer
        for rates, rows in fits
        for answer in ask(rates if corrected else replace(rates, corrections=()), rows)
    ]


def scores(asked: Asked) -> dict[str, float]:
    """Measures of the quality of predictions.

    Take the k steps that are predicted to be fastest. Regret is how much longer the fastest of them
    takes than the fastest of all, averaged over the groups that a planner would choose among. Ranks
    are compared in groups of at least three rows.
    """
    error = np.array([predicted / row.step_time_s - 1.0 for row, predicted, _ in asked])
    groups: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for row, predicted, _ in asked:
        groups[row.group].append((predicted, row.step_time_s))
    choices = [sorted(group) for group in groups.values() if len(group) > 1]
    ranks = np.array([spearman(group) for group in choices if len(group) > 2])
    regrets = {
        k: [
            min(time for _, time in group[:k]) / min(time for _, time in group) - 1.0
            for group in choices
        ]
        for k in (1, 3)
    }
    return {
        "rows": len(asked),
        "mape": float(abs(error).mean()),
        "median_error": float(np.median(abs(error))),
        "bias": float(error.mean()),
        "within_interval": float(np.mean([within for *_, within in asked])),
        "groups": len(choices),
        "spearman_mean": float(ranks.mean()) if len(ranks) else 1.0,
        "spearman_least": float(ranks.min()) if len(ranks) else 1.0,
        "groups_with_spearman_below_0.9": int((ranks < 0.9).sum()),
        **{f"top{k}_regret": float(np.mean(regret or [0.0])) for k, regret in regrets.items()},
        **{
            f"top{k}_regret_worst": float(max(regret, default=0.0)) for k, regret in regrets.items()
        },
    }


def spearman(pairs: Iterable[tuple[float, float]]) -> float:
    """Rank correlation. Equal values share their mean rank.

    It is 1 if all values of one side are equal.
    """
    sides = [np.array(values) for values in zip(*pairs, strict=True)]
    ranks = [
        np.array([(values < each).sum() + (values <= each).sum() for each in values])
        for values in sides
    ]
    return float(np.corrcoef(ranks)[0, 1]) if all(np.ptp(rank) for rank in ranks) else 1.0


def vtrain_report(folder: Path) -> dict[str, dict[str, Any]]:
    """All scores of the time model on vTrain's rows.

    On several nodes every model has a width of its own, so a model left out is a width left out.
    """
    one, several = Rows.read(folder / ONE_NODE), Rows.read(folder / SEVERAL_NODES)
    cuts: dict[str, Fits] = {
        "one node, each model left out": left_out(one, lambda row: row.model),
        "one node, each width left out": left_out(one, lambda row: row.embed),
        "several nodes, from one node alone": [(fit_rates(one.samples, start()), several)],
    }
    for name, also in (("", ()), (", one node's rows known", one.samples)):
        cuts |= {
            f"several nodes, each model left out{name}": left_out(
                several, lambda row: row.model, also
            ),
            f"several nodes, each number of nodes left out{name}": left_out(
                several, lambda row: row.devices, also
            ),
        }
    unfitted = {"one node": ask(start(), one), "several nodes": ask(start(), several)}
    on_several = {
        "each model left out": ask_each(cuts["several nodes, each model left out"]),
        "nothing fitted": unfitted["several nodes"],
    }
    report: dict[str, dict[str, Any]] = {}
    for name, fits in cuts.items():
        report[name] = scores(ask_each(fits))
        report[f"{name}, rates only"] = scores(ask_each(fits, corrected=False))
    return {
        **report,
        **{f"{name}, nothing fitted": scores(asked) for name, asked in unfitted.items()},
        **{
            f"several nodes, bias by tensor, {name}": bias_by_tensor(asked)
            for name, asked in on_several.items()
        },
        **{
            f"several nodes, Spearman by group, {name}": spearman_by_group(asked)
            for name, asked in on_several.items()
        },
        **{
            f"several nodes, what a perfect model would reach, {group}": reachable(rows)
            for group, rows in groups_of(several.rows).items()
        },
    }


def groups_of(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows by group."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[group_name(row)].append(row)
    return groups


def group_name(row: Row) -> str:
    """The width and the number of devices of a row."""
    return f"width {row.embed} on {row.devices}"


def spearman_by_group(asked: Asked) -> dict[str, float]:
    """Rank correlation of predicted and measured times of each group."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, predicted, _ in asked:
        pairs[group_name(row)].append((predicted, row.step_time_s))
    return {group: spearman(some) for group, some in pairs.items()}


def bias_by_tensor(asked: Asked) -> dict[str, dict[str, float]]:
    """Mean of predicted / measured - 1 by size of tensor, for each group."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, predicted, _ in sorted(asked, key=lambda each: each[0].tensor):
        ratio = predicted / row.step_time_s
        errors[group_name(row)][f"tensor={row.tensor}"].append(ratio - 1.0)
    return {
        group: {name: float(np.mean(some)) for name, some in by_tensor.items()}
        for group, by_tensor in errors.items()
    }


ALIKE = ("tensor", "rows")
"""Rows of a group that agree in these fields compute the same layers, placed on other stages."""
DRAWS = 2000


def reachable(rows: Sequence[Row]) -> dict[str, float]:
    """The Spearman correlation that an exact model would reach on these measurements, and the
    measurement scatter that it follows from.

    A step takes (microbatches + stages - 1) x layers per stage x cost of a layer. Rows that agree
    in ALIKE should have the same cost of a layer. Their deviations from it, pooled per tensor size,
    are taken as the scatter of measurements. Ranks are drawn with that scatter around the mean
    costs.
    """
    ticks = np.array(
        [
            (row.global_batch // (row.data * row.rows) + row.pipe - 1) * row.layers / row.pipe
            for row in rows
        ]
    )
    cost = np.log([row.step_time_s for row in rows]) - np.log(ticks)
    alike = np.array([[getattr(row, name) for name in ALIKE] for row in rows])
    mean = np.array([cost[(alike == own).all(axis=1)].mean() for own in alike])
    tensor, scatter = alike[:, 0], np.zeros(len(rows))
    for some in [tensor > 0, *(tensor == each for each in np.unique(tensor))]:
        freedom = some.sum() - len(np.unique(alike[some], axis=0))
        if freedom > 1:
            scatter[some] = ((cost - mean)[some] ** 2).sum() ** 0.5 / freedom**0.5
    step_s, draw = np.exp(mean) * ticks, np.random.default_rng(0)
    ranks = [
        spearman(zip(step_s, step_s * np.exp(draw.normal(scale=scatter)), strict=True))
        for _ in range(DRAWS)
    ]
    return {
        "rows": len(rows),
        "spearman_expected": float(np.mean(ranks)),
        "spearman_5_percent": float(np.quantile(ranks, 0.05)),
        "spearman_95_percent": float(np.quantile(ranks, 0.95)),
        **{
            f"scatter_tensor_{each}": float(scatter[tensor == each][0])
            for each in np.unique(tensor)
        },
    }


def fitted_report(fit: Sequence[Path], test: Sequence[Path]) -> dict[str, Any]:
    """Scores on the rows of some files with rates fitted to others, and every prediction in ms."""
    known, asked_rows = Rows.read(*fit), Rows.read(*test)
    rates = fit_rates(known.samples, start())
    asked = ask(rates, asked_rows)
    by_nodes = {
        name: [each for each in asked if (each[0].devices <= DEVICES_PER_HOST) == is_one]
        for name, is_one in (("one node", True), ("several nodes", False))
    }
    predictions = [
        {**vars(row), "predicted_s": predicted, "within_interval": within}
        for row, predicted, within in asked
    ]
    return {
        **scores(asked),
        "fit_rows": len(known.rows),
        **{
            name: scores(part) for name, part in by_nodes.items() if part and len(part) < len(asked)
        },
        "rates": {name: getattr(rates, name) for name in (*FITTED, "spread", "spread_nearby")},
        "predictions": predictions,
    }


def lines(report: Mapping[str, Any], indent: str = "") -> list[str]:
    """The report as text: a line for each figure, with its target if there is one, or for each row.

    vTrain's single rows appear only in JSON.
    """
    text = []
    for name, value in report.items():
        if isinstance(value, Mapping) and ("error" in value or "rank" in value):
            figures = (
                f"{key} {figure:.3g}" if isinstance(figure, float) else f"{key} {figure}"
                for key, figure in value.items()
                if key != "url"
            )
            text.append(f"{indent}{name}: {'; '.join(figures)}")
        elif isinstance(value, Mapping):
            text += [indent + name, *lines(value, indent + "    ")]
        elif not isinstance(value, list):
            text.append(
                f"{indent}{name:32} {value:.4g}"
                + (f"   (target {TARGETS[name]})" if name in TARGETS else "")
            )
    return text


def main() -> None:
    """Parse the flags and print the report."""
    parser = argparse.ArgumentParser(
        description="Print the accuracy of the planner's time model on measured steps."
    )
    parser.add_argument(
        "--vtrain",
        type=path_argument,
        metavar="DIR",
        help=f"folder with {ONE_NODE} and {SEVERAL_NODES}",
    )
    parser.add_argument(
        "--fit", type=path_argument, nargs="+", metavar="CSV", help="rows to fit to"
    )
    parser.add_argument(
        "--test", type=path_argument, nargs="+", metavar="CSV", help="rows to predict"
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="compare with published layouts and throughputs",
    )
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="rank published layouts in this project's own ranking",
    )
    parser.add_argument(
        "--terms",
        action="store_true",
        help="show the terms of this project's own step beside Megatron-Core's published times",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if bool(options.fit) != bool(options.test) or not (
        options.vtrain or options.fit or options.published or options.ranks or options.terms
    ):
        parser.error("give --vtrain DIR, --fit CSV --test CSV, --published, --ranks or --terms")
    report: dict[str, Any] = vtrain_report(options.vtrain) if options.vtrain else {}
    if options.fit:
        report |= fitted_report(options.fit, options.test)
    if options.published:
        report |= published_report() | {
            "weak scaling": scaling_report(),
            "comparisons": comparison_report(read("comparisons")),
        }
    if options.ranks:
        report |= {"ranks": rank_report()}
    if options.terms:
        report |= {"terms": terms_report()}
    print(json.dumps(report, indent=2) if options.json else "\n".join(lines(report)))


if __name__ == "__main__":
    main()
