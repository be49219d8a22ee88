"""benchmarks/planner.py reads both kinds of file, and its figures are right where the answer is known."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "planner.py"
COLUMNS = ("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length", "tensor parallelism",
           "data parallelism", "pipeline parallelism", "iteration time (ms)")


@pytest.fixture(scope="module")
def planner():
    spec = importlib.util.spec_from_file_location("planner_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(planner, path: Path, *, layers: int, embed: int, slower: float, first_column: bool) -> None:
    """Rows that take `slower` times as long as predicted with nothing fitted."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow((["Parameters (billion)"] if first_column else []) + list(COLUMNS))
        for tensor, data, pipe in ((1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (1, 2, 4)):
            for rows in (1, 4):
                cells = [8, 32, rows, embed, 16, layers, 1024, tensor, data, pipe, 1.0]
                sample = planner.Rows([planner.Row(dict(zip(COLUMNS, map(str, cells), strict=True)))]).samples[0]
                cells[-1] = 1e3 * slower * sample.predicted(planner.start()).step_time_s
                table.writerow(([1.0] if first_column else []) + cells)


def asked(planner, monkeypatch, capsys, *arguments) -> dict:
    monkeypatch.setattr(sys, "argv", ["planner.py", *map(str, arguments), "--json"])
    planner.main()
    return json.loads(capsys.readouterr().out)


def test_rows_of_one_file_predict_those_of_another(planner, tmp_path, monkeypatch, capsys):
    write(planner, tmp_path / "a.csv", layers=12, embed=2048, slower=1.3, first_column=False)
    write(planner, tmp_path / "b.csv", layers=24, embed=2048, slower=1.3, first_column=True)
    report = asked(planner, monkeypatch, capsys, "--fit", tmp_path / "a.csv", "--test", tmp_path / "b.csv")
    assert (report["rows"], report["fit_rows"], report["groups"], len(report["predictions"])) == (12, 12, 1, 12)
    assert report["mape"] < 0.05, "30% is what it is without a fit"
    assert report["spearman_least"] > 0.95
    assert report["top1_regret"] < 0.01


def test_scores_by_hand(planner):
    def row(time_ms: float):
        cells = [8, 8, 1, 1024, 16, 12, 1024, 1, 8, 1, time_ms]
        return planner.Row(dict(zip(COLUMNS, map(str, cells), strict=True)))

    asked = [(row(1000), 1.2, True), (row(2000), 1.0, False), (row(4000), 4.0, True), (row(8000), 8.0, True)]
    scores = planner.scores(asked)
    assert scores["mape"] == pytest.approx((0.2 + 0.5) / 4)
    assert scores["bias"] == pytest.approx((0.2 - 0.5) / 4)
    assert (scores["top1_regret"], scores["top3_regret"]) == (1.0, 0.0), "the row predicted fastest takes twice the fastest's time"
    assert scores["spearman_mean"] == pytest.approx(0.8)
    assert scores["within_interval"] == 0.75


def test_published_throughputs_are_met_within_15_percent(planner):
    """With nothing fitted; Narayanan et al. 2021, arXiv:2104.04473, table 1."""
    report = planner.published_report()
    assert len(report) == 10
    assert max(abs(figures["error"]) for figures in report.values()) < 0.15


def test_it_says_what_it_wants(planner, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["planner.py", "--fit", "a.csv"])
    with pytest.raises(SystemExit):
        planner.main()
    assert "--test" in capsys.readouterr().err
