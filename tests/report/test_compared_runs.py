"""Runs side by side: a line for each in every chart, and what differs between them."""

import re

import pytest
from sample_run import FIRST, SECOND, step, write_run
from test_run_report import Reader, without_plotly

from optimus_jax.cli.report import WATCH_S, write_report
from optimus_jax.config import Config
from optimus_jax.report.compared_runs import compared_runs, distinct_names
from optimus_jax.report.run_charts import draw_loss
from optimus_jax.report.run_history import RunHistory
from optimus_jax.run_directory.directory import RunDirectory

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "a" / "run").close()
    other = RunDirectory.create(folder / "b" / "run", "gpt2")
    other.write_config(Config(steps=40).to_json())
    for number in range(1, 41):
        other.log_step(step(number, SECOND, step_time_s=0.5, loss=3.0))
    other.log_event("eval", 40, loss=2.9, perplexity=18.0, bits_per_byte=None, tokens=10)
    other.close()
    return [folder / "a" / "run", folder / "b" / "run"]


def test_each_run_has_its_line_its_facts_and_its_settings(paths):
    shown = Reader(compared_runs(paths))
    for chart in ("loss", "loss-time", "times", "quantities"):
        names = {trace.get("name") for trace in shown.figures[chart]["data"]}
        assert {"a/run", "b/run"} <= names, chart
        assert shown.figures[chart]["layout"]["showlegend"]
    for words in ("60 of 80", "40 of 40", "2.9", "Settings that are not the same", "500 ms"):
        assert words in shown.words, words
    rows = re.findall(r"steps\s+80\s+40", shown.words)
    assert rows, "of the settings"
    lines = {trace["name"]: trace["line"] for trace in shown.figures["times"]["data"]}
    assert lines["a/run"]["color"] != lines["b/run"]["color"]


def test_a_loss_is_shown_by_the_time_of_all_steps_too(paths):
    chart = draw_loss({"b": RunHistory.read(paths[1])}, by="time")
    training, held_out = chart.figure.data
    assert training.x[-1] == pytest.approx(40 * 0.5 / 3600)
    assert held_out.x[0] == pytest.approx(training.x[-1])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["x/run", "y/run", "other"], ["x/run", "y/run", "other"]),
        (["p/x/run", "q/x/run"], ["p/x/run", "q/x/run"]),
        (["run", "x/run/"], ["run", "x/run"]),
        (["run", "run"], ["run", "run (2)"]),
    ],
)
def test_names_are_the_ends_of_paths_that_differ(paths, names):
    assert distinct_names(paths) == names


def test_a_run_is_watched_until_it_ends(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    run.log_event("start", 0)
    out, waited = tmp_path / "page.html", []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        assert 'http-equiv="refresh"' in out.read_text()
        run.log_step(step(len(waited), FIRST))
        if len(waited) == 2:
            run.log_event("end", 2, reason="done")

    write_report([run.path], out, watch=True, wait=wait)
    assert waited == [WATCH_S, WATCH_S]
    assert 'http-equiv="refresh"' not in without_plotly(out.read_text()), "it is the last page"
    assert "2 of unknown" in Reader(out.read_text()).words
    run.close()


def test_ctrl_c_leaves_a_page_that_does_not_wait_for_another(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    run.log_step(step(1))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    write_report([run.path], tmp_path / "page.html", watch=True, wait=interrupt)
    text = (tmp_path / "page.html").read_text()
    assert 'http-equiv="refresh"' not in without_plotly(text)
    run.close()
