"""The report of a sample run: every number is in its place, missing values are "unknown", and text
is escaped.
"""

import itertools
import json
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_run import FIRST, LAST_WHY, PHASES, PLAN, SECOND, step, write_run

from optimus_jax.config import Config
from optimus_jax.config.presets import model_preset
from optimus_jax.control import policy
from optimus_jax.errors import ConfigError, counted
from optimus_jax.planning.search.explain import flags
from optimus_jax.report import formatting
from optimus_jax.report.charts import MAX_POINTS, downsampled, plan_letter
from optimus_jax.report.run_charts import draw_loss, draw_memory, draw_step_times, draw_switch
from optimus_jax.report.run_events import (
    AlternativeRecord,
    DecisionRecord,
    is_finite_number,
    number,
    parse_decision,
)
from optimus_jax.report.run_history import RunHistory
from optimus_jax.run_directory.directory import RunDirectory

pytest.importorskip("plotly")
from plotly.offline import get_plotlyjs

from optimus_jax.report.components import MAX_ROWS
from optimus_jax.report.page import VARIABLES
from optimus_jax.report.run_report import run_report

FEW = settings(max_examples=12)
"""Each example renders a whole page."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Iterator[Path]:
    run = write_run(tmp_path_factory.mktemp("runs") / "sample")
    yield run.path
    run.close()


@pytest.fixture(scope="module")
def history(path) -> RunHistory:
    return RunHistory.read(path)


class Reader(HTMLParser):
    """Tags, attributes and text of a page, and the figures of its charts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words = self.data = ""
        self._script = ""
        self.feed(text)
        self.figures = json.loads(self.data)["figures"] if self.data else {}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._script = dict(attrs).get("id", tag) if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._script = ""

    def handle_data(self, data):
        if self._script == "charts":
            self.data += data
        elif not self._script:
            self.words += data

    def values(self, name: str) -> list[str]:
        return [value or "" for _, other, value in self.attributes if other == name]


def without_plotly(text: str) -> str:
    """The page without the library's code."""
    return text.replace(get_plotlyjs(), "")


@pytest.fixture(scope="module")
def shown(path) -> Reader:
    return Reader(run_report(path))


def test_spans_are_the_plans_in_the_order_they_ran(history):
    assert [(span.plan, span.first, span.last, span.step_time_s) for span in history.spans] == [
        (FIRST, 1, 30, pytest.approx(0.21)),
        (SECOND, 31, 50, 0.11),
        (FIRST, 51, 60, pytest.approx(0.21)),
    ]
    assert [[one.step for one in history.steps_in(span)][::29] for span in history.spans] == [
        [1, 30],
        [31],
        [51],
    ]
    assert history.plans == [FIRST, SECOND, "tried0000000"]
    assert history.layouts == {
        FIRST: PLAN.describe(),
        SECOND: "mesh data=8, zero 0",
        "tried0000000": "mesh tensor=8, zero 0",
    }


def test_decisions_are_read_with_their_alternatives(history):
    assert [(one.action, one.step, one.plan) for one in history.decisions] == [
        ("tried", 0, FIRST),
        ("tried", 0, "tried0000000"),
        ("switch", 24, SECOND),
        ("stay", 58, None),
    ]
    best, other = history.decisions[2].alternatives
    assert (best.gain_s, best.cost_s, best.probability) == (12.0, 1.5, 0.97)
    assert other.gain_s is None


def test_inputs_of_older_decisions_are_read_under_their_present_names():
    inputs = {"link_slowdown/between": 2.0, "conditions": {"inside": 3.0, "skew": 1.5}, "x": 1}
    read = parse_decision({"event": "decision", "step": 7, "inputs": inputs})
    assert read.inputs == {
        "link_slowdown/inter_host": 2.0,
        "conditions": {"intra_host": 3.0, "skew": 1.5},
        "x": 1,
    }


def test_decisions_written_by_the_controller_are_read_back():
    alternative = policy.Alternative(
        plan=PLAN,
        switch_method="remesh",
        step_time_s=0.5,
        gain_s=9.0,
        cost_s=1.0,
        probability=0.95,
        verdict="chosen",
    )
    decision = policy.Decision(
        step=7,
        action="switch",
        why="it is worth it",
        plan=PLAN,
        switch_method="remesh",
        trigger="a slower link",
        step_time_s=0.75,
        inputs={"link": 4.0},
        alternatives=(alternative,),
    )
    read = parse_decision({"event": "decision", "step": 7, "time_s": 1.0, **decision.as_json()})
    assert read == DecisionRecord(
        step=7,
        time_s=1.0,
        action="switch",
        why="it is worth it",
        switch_method="remesh",
        plan=PLAN.digest,
        layout=flags(PLAN),
        trigger="a slower link",
        current_step_time_s=0.75,
        inputs={"link": 4.0},
        predicted_step_time_s=0.5,
        measured_step_time_s=None,
        alternatives=(
            AlternativeRecord(
                layout=flags(PLAN),
                plan=PLAN.digest,
                switch_method="remesh",
                predicted_step_time_s=0.5,
                gain_s=9.0,
                cost_s=1.0,
                probability=0.95,
                why="chosen",
            ),
        ),
    )


def test_a_switch_has_phase_times_and_step_times_before_and_after(history):
    remesh, rollback = history.switches
    assert dict(remesh.phases_s) == PHASES
    assert (remesh.before_s, remesh.after_s) == (pytest.approx(0.21), 0.11)
    assert rollback.phases_s == (("move", 0.3), ("verify", None))
    assert (rollback.before_s, rollback.after_s) == (0.11, pytest.approx(0.21))


def test_predictions_are_compared_with_the_steps_under_that_plan(history):
    assert [
        (one.plan, one.predicted_s, one.measured_s, one.is_trial) for one in history.comparisons
    ] == [(FIRST, 0.18, 0.21, True), ("tried0000000", 0.3, 0.45, True), (SECOND, 0.1, 0.11, False)]
    assert history.comparisons[-1].source == "median of steps 31 to 50"


def test_a_plan_replaced_before_it_ran_has_no_measurement(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    decided = {"action": "switch", "plan": SECOND, "predicted_step_time_s": 0.1}
    for index in range(1, 11):
        run.log_step(step(index, FIRST if index < 8 else SECOND))
    run.log_event("decision", 2, **decided)
    run.log_event("decision", 5, **decided)
    run.log_event("decision", 9, **decided | {"plan": FIRST})
    measured = [pair.measured_s for pair in RunHistory.read(run.path).comparisons]
    assert measured == [
        None,
        pytest.approx(0.21, abs=0.02),
        None,
    ], "steps before a decision do not tell how it came out"


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("done", "done"),
        ("terminate", "stopped on request"),
        ("not learning", "it no longer learned"),
        ("odd", "ended: odd"),
        ("error", "ended by an error: the disk is full"),
        (None, "under way"),
    ],
)
def test_the_status_tells_how_the_run_ended(tmp_path, reason, status):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    run.log_event("start", 0)
    run.log_step(step(1))
    if reason is not None:
        run.log_event("end", 1, reason=reason, why="the disk is full" if reason == "error" else "")
    found = RunHistory.read(run.path)
    assert status in found.status
    assert found.has_ended == (reason is not None)
    run.log_event("resume", 1)
    found = RunHistory.read(run.path)
    assert (found.status, found.has_ended) == ("under way", False)
    run.close()
    found = RunHistory.read(run.path)
    assert ("its process is gone" in found.status, found.has_ended) == (True, True)
    (run.path / "lock").write_text("process 1 on another-machine")
    found = RunHistory.read(run.path)
    assert (found.status, found.has_ended) == ("no end is recorded: under way, or killed", False)


def test_the_reason_for_the_current_plan_comes_from_its_last_event(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    reasons = []
    for name, fields in (
        ("plan", {"why": "it was given"}),
        ("decision", {"action": "switch", "why": "it is faster"}),
        ("remesh", {}),
        ("decision", {"action": "stay", "why": "it is good"}),
        ("rollback", {"why": "it was slower"}),
        ("rollback", {}),
    ):
        run.log_event(name, 1, **fields)
        reasons.append(RunHistory.read(run.path).why_current)
    assert reasons == [
        "it was given",
        "it was given",
        "it is faster",
        "it is faster",
        "it was slower",
        None,
    ]


def test_the_page_shows_known_and_unknown_values(shown):
    for words in (
        LAST_WHY,
        "data=8 saves half of every step",
        "under way",
        "60 of 80",
        "the canary was slower than promised",
        "training paused for 484 ms",
        "12 MiB",
        "Predicted 300 ms a step, measured 450 ms.",
        "device: 3; what: lost",
        "on held-out data",
        "accuracy",
        "peak unknown",
        "1 step without an update",
        "0.21 ± 0.01 (20 samples, good)",
        "1.10",
        "--mesh data=8",
        "saves 3% of a step",
        "the loss",
        "220 ms a step",
        "(10 steps)",
    ):
        assert words in shown.words, words
    assert "nan" not in shown.words.lower().replace("finance", "")
    assert "None" not in shown.words.replace("None is recorded", "")


def test_texts_of_a_run_are_escaped(tmp_path):
    hostile = "<script>alert(1)</script>\"'&$x_1^2$"
    run = RunDirectory.create(tmp_path / "<i>run</i>", "gpt2")
    run.write_config(json.dumps({"model": {"name": hostile}, "control": hostile}))
    run.log_event("start", 0, devices=hostile, data=hostile)
    run.log_step(step(1, hostile))
    fields = {"plan": hostile, "layout": hostile, "why": hostile, "switch_method": hostile}
    run.log_event(
        "decision",
        1,
        action="switch",
        inputs={hostile: hostile},
        alternatives=[{**fields, "predicted_step_time_s": 1.0}],
        **fields,
    )
    run.log_event("remesh", 1, phases_s={hostile: 1.0}, from_plan=hostile, **fields)
    run.log_event("fault", 1, **{hostile: hostile})
    text = run_report(run.path)
    shown = Reader(text)
    assert "i" not in shown.tags
    assert shown.tags.count("script") == 3, "plotly, the figures, and the page's own"
    assert "<script>alert" not in text
    assert shown.words.count(hostile) > 12
    assert any(hostile in label for label in shown.values("aria-label"))
    drawn = [trace["y"] for trace in shown.figures["switch0"]["data"]]
    assert "&lt;script&gt;" in str(drawn), "plotly reads some tags in texts"


def test_characters_that_cannot_be_stored_are_replaced(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    odd = "a\x00b\ud800\x1b[1m"
    run.log_event("decision", 0, action="stay", why=odd, layout=odd)
    run.log_event("remesh", 0, phases_s={odd: 1.0, "move": 2.0}, plan=odd, layout=odd)
    text = run_report(run.path)
    assert "a\ufffdb\ufffd\ufffd[1m" in text
    assert text.encode() == text.encode(errors="replace")
    assert "\x00" not in text


def test_the_page_is_self_contained_and_its_references_resolve(path, shown):
    ids = shown.values("id")
    assert len(ids) == len(set(ids))
    links = shown.values("href")
    assert links
    assert all(link.removeprefix("#") in ids for link in links if link != "data:,")
    assert all(f"{name}-chart" in ids for name in shown.figures)
    assert not shown.values("src")
    assert "://" not in without_plotly(run_report(path))
    assert not {"img", "iframe"} & set(shown.tags)


def test_the_page_is_accessible_to_screen_readers(shown):
    assert shown.tags.count("h1") == 1
    assert [tag for tag in shown.tags if tag in ("h1", "h2", "h3")][:2] == ["h1", "h2"]
    assert shown.tags.count("table") == shown.tags.count("caption")
    assert shown.values("role").count("img") == len(shown.figures) == 7
    labels = [value for _, name, value in shown.attributes if name == "aria-label"]
    assert any("prepare 4.2 s, agree 50 ms" in label for label in labels)
    assert any("verify unknown" in label for label in labels)
    assert ("html", "lang", "en") in shown.attributes


def test_a_page_that_is_watched_is_read_again(path):
    assert '<meta http-equiv="refresh" content="15">' in run_report(path, refresh_s=15)
    assert 'http-equiv="refresh"' not in without_plotly(run_report(path))


def test_charts_have_only_colours_that_a_dark_screen_replaces(shown):
    def colours(value: object, key: str = "") -> Iterator[str]:
        if isinstance(value, dict):
            for name, item in value.items():
                yield from colours(item, name)
        elif isinstance(value, list):
            for item in value:
                yield from colours(item, key)
        elif isinstance(value, str) and "color" in key.lower():
            yield value.lower()[:7]

    found = set(colours(shown.figures))
    assert len(found) > 5
    assert found <= {*VARIABLES, "rgba(0,"}


def test_parts_of_a_chart_have_tooltips(history):
    figure = draw_step_times({"run": history}).figure
    titles = [note.hovertext for note in figure.layout.annotations]
    assert titles[1].startswith("plan B, steps 31 to 50, median 110 ms: mesh data=8")
    assert titles[0].startswith("plan A, steps 1 to 30, median 210 ms")
    assert any(title.startswith("rollback after step 50") for title in titles)
    assert [note.text for note in figure.layout.annotations] == ["A", "B", "A", "◆", "◇"]


def test_the_report_of_a_run_before_its_first_step(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    run.log_event(
        "decision",
        0,
        plan=FIRST,
        layout="mesh data=1",
        predicted_step_time_s=1.0,
        measured_step_time_s=2.0,
    )
    shown = Reader(run_report(run.path))
    for words in (
        "No step is recorded yet",
        "trial before the first step",
        "config.json",
        "0 of unknown",
    ):
        assert words in shown.words


def test_the_report_of_a_run_without_decisions(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    run.write_config("{}")
    run.log_step(step(1, peak_bytes=3 * 2**30, step_time_s=0.2, data_wait_s=0.05))
    shown = Reader(run_report(run.path))
    for words in (
        "peak 3 GiB",
        "of these, steps that waited for data\n100.0%",
        "switches",
    ):
        assert words in shown.words
    headings = {value for tag, name, value in shown.attributes if (tag, name) == ("section", "id")}
    assert headings == {"loss", "overview", "step-time", "rates", "plans", "memory"}


def test_a_resumed_run_shows_its_settings_and_where_its_time_went(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    config = Config(steps=80, control="advise", model=model_preset("gpt2-nano"))
    run.write_config(config.to_json(derived={"optimizer.lr": 0.003}))
    run.log_event("start", 0, devices="8 x cpu (cpu)")
    run.log_step(step(1))
    run.log_event("checkpoint", 1, blocked_s=0.02)
    changed = {"steps": [40, 80], "parallel.zero": [None, 3], "log.progress": ["auto", "none"]}
    more = {"lr_before": 0.003, "lr_now": 0.001, "settings": changed}
    run.log_event("resume", 1, devices="4 x cpu (cpu)", **more)
    run.log_step(step(2, SECOND))
    run.log_event(
        "profile",
        2,
        first_step=2,
        plan=SECOND,
        step_time_s=0.2,
        parts_s={"attention": 0.15, "tensor": 0.05},
        beside_s={"tensor": 0.01},
        predicted_s={"attention": 0.1, "fsdp": 0.02},
        memory_bytes={"params": 3 * 2**20, "activations": 2**20},
        predicted_bytes={"params": 3 * 2**20},
        allocated_bytes=5 * 2**20,
        folder="profiles/step-2",
    )
    shown = Reader(run_report(run.path))
    for words in (
        "control",
        "advise",
        "optimizer.lr",
        "0.003, then 0.001",
        "steps: 40, then 80; parallel.zero: none, then 3",
        "4 x cpu (cpu)",
        "0; resumed under 2 plans",
        "Steps 2 to 2: 200 ms a step",
        "75.0%",
        "of 5 MiB that XLA allocates",
        "learning rate",
        "↻ resumes",
    ):
        assert words in shown.words, words
    assert "model.num_layers" not in shown.words, "that is gpt2-nano's"
    assert "log.progress: auto" not in shown.words, "it changes no number"
    assert shown.words.index("Loss") < shown.words.index("Overview")
    assert "Evaluations" not in shown.words, "nothing was evaluated"
    run.close()


def test_a_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no run to report on[\s\S]*do: "):
        run_report(tmp_path)


@given(cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@settings(max_examples=40)
def test_logs_cut_anywhere_can_be_read(path, cuts):
    with tempfile.TemporaryDirectory() as folder:
        for name, cut in zip(("metrics.jsonl", "events.jsonl"), cuts, strict=True):
            content = (path / name).read_bytes()
            (Path(folder) / name).write_bytes(content[: round(cut * len(content))])
        history = RunHistory.read(folder)
        assert [one.step for one in history.steps] == list(range(1, len(history.steps) + 1))
        assert [pair.predicted_s for pair in history.comparisons] == [0.18, 0.3, 0.1][
            : len(history.comparisons)
        ]
        assert all(told.startswith("config.json") for told in history.read_errors)


def test_a_damaged_line_is_skipped_and_reported(path, tmp_path):
    for name in ("metrics.jsonl", "events.jsonl", "config.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes() + b'{"event": "dec\x00\n')
    shown = Reader(run_report(tmp_path))
    for words in (
        "metrics.jsonl, line 61, is damaged",
        "events.jsonl, line 13, is damaged",
        "config.json: ",
        LAST_WHY,
    ):
        assert words in shown.words


@pytest.mark.parametrize(
    ("value", "is_known"),
    ids=itertools.count(),
    argvalues=[
        (0, True),
        (-1.5, True),
        (2**1000, True),
        (2**2000, False),
        (float("inf"), False),
        (float("nan"), False),
        (True, False),
        ("1", False),
        (None, False),
    ],
)
def test_a_known_value_is_a_finite_number(value, is_known):
    assert is_finite_number(value) == is_known
    assert number({"field": value}, "field") == (value if is_known else None)


any_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(2**2000)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)
FIELDS = (
    "plan",
    "from_plan",
    "layout",
    "why",
    "action",
    "alternatives",
    "inputs",
    "phases_s",
    "predicted_step_time_s",
    "measured_step_time_s",
    "loss",
    "step",
    "time_s",
    "reason",
    "step_bytes_per_device",
)


@given(
    events=st.lists(
        st.fixed_dictionaries(
            {
                "event": st.sampled_from(
                    ["decision", "remesh", "rollback", "eval", "compile", "end", "fault", "plan"]
                )
            },
            optional=dict.fromkeys(FIELDS, any_value),
        ),
        max_size=6,
    ),
    fields=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("step_time_s", "peak_bytes", "plan", "tokens_per_s", "mfu", "data_wait_s"), any_value
        ),
    ),
)
@FEW
def test_any_field_value_gives_a_page(events, fields):
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps(event).encode() + b"\n" for event in events]
        (Path(folder) / "events.jsonl").write_bytes(b"".join(lines))
        written = {
            "step": 1,
            "loss": 1.0,
            "grad_norm": 1.0,
            "lr": 1.0,
            "tokens": 1,
            "step_time_s": 1.0,
            "tokens_per_s": 1.0,
            "mfu": None,
            "plan": "a",
            "peak_bytes": None,
        }
        (Path(folder) / "metrics.jsonl").write_text(json.dumps(written | fields) + "\n")
        assert run_report(folder).endswith("</html>\n")


def test_a_long_run_makes_a_page_of_bounded_size(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    for index in range(1, 6 * MAX_POINTS):
        run.log_step(step(index, step_time_s=9.0 if index == 77 else 0.2))
    for index in range(1, MAX_ROWS + 101):
        run.log_event(
            "decision", index, action="switch" if index == 5 else "stay", why=f"reason {index}."
        )
    text = without_plotly(run_report(run.path))
    assert len(text) < 1_500_000
    for words in (
        "Each point is the median of 6 steps",
        "1 step above the top of the chart, at most 9 s",
        "99 older decisions are left out",
        "reason 5.",
        "reason 300.",
    ):
        assert words in text
    assert "reason 6." not in text, "a switch is kept, an old stay is not"


def test_the_loss_chart_marks_plans_switches_and_resumes(history, tmp_path):
    chart = draw_loss({"run": history})
    assert "Bands and letters: plans; ◆ re-meshes; ◇ rollbacks" in chart.caption
    letters = [mark.text for mark in chart.figure.layout.annotations]
    assert letters[:3] == ["A", "B", "A"]
    plain = draw_loss({"run": RunHistory.read(_with_one_step(tmp_path))})
    assert plain is None or not plain.figure.layout.annotations
    assert not draw_loss({"a": history, "b": history}).figure.layout.annotations


def test_the_memory_chart_shows_measured_and_compiled_bytes(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "gpt2")
    assert (
        draw_memory(RunHistory.read(write_run(tmp_path / "sample").path)).caption
        == "On one device: peak unknown, because the backend does not report it; the last compiled"
        " step needs 70 MiB; ◆ re-meshes; ◇ rollbacks."
    )
    run.log_step(step(1, peak_bytes=2**30))
    run.log_step(step(2, peak_bytes=2**31))
    (line,) = draw_memory(RunHistory.read(run.path)).figure.data
    assert (list(line.x), list(line.y)) == ([1, 2, 2], [1, 2, 2])
    assert draw_memory(RunHistory.read(_with_one_step(tmp_path))) is None


def _with_one_step(tmp_path: Path) -> Path:
    run = RunDirectory.create(tmp_path / "bare", "gpt2")
    run.log_step(step(1))
    return run.path


def test_phases_of_a_switch_are_drawn_one_after_another(history):
    (bars,) = draw_switch(history.switches[0], "first").figure.data
    assert list(bars.base) == pytest.approx([0, *np.cumsum(list(PHASES.values()))[:-1]])
    assert [width for width in bars.x if width > 0.01] == pytest.approx(
        [seconds for seconds in PHASES.values() if seconds > 0.01]
    )
    assert list(bars.marker.pattern.shape) == ["/", "", "", "", ""]


@given(values=st.lists(st.floats(0, 10), min_size=1, max_size=50), per_point=st.integers(1, 60))
def test_a_downsampled_line_keeps_extremes(values, per_point):
    line = downsampled(list(enumerate(values)), per_point)
    assert (line.low.min(), line.high.max()) == (min(values), max(values))
    assert (line.low <= line.middle).all()
    assert (line.middle <= line.high).all()
    assert len(line.x) == -(-len(values) // per_point)


def test_plan_letters_are_distinct():
    letters = [plan_letter(index) for index in range(800)]
    assert letters[:2] + letters[25:28] + letters[701:703] == [
        "A",
        "B",
        "Z",
        "AA",
        "AB",
        "ZZ",
        "AAA",
    ]
    assert len(set(letters)) == 800


@pytest.mark.parametrize(
    ("formatted", "text"),
    [
        (formatting.format_duration(None), "unknown"),
        (formatting.format_duration(float("nan")), "unknown"),
        (formatting.format_duration(0), "0 s"),
        (formatting.format_duration(2e-5), "20 µs"),
        (formatting.format_duration(0.0412), "41.2 ms"),
        (formatting.format_duration(3.066), "3.07 s"),
        (formatting.format_duration(125), "2 min 5 s"),
        (formatting.format_duration(12000), "3 h 20 min"),
        (formatting.format_bytes(None), "unknown"),
        (formatting.format_bytes(0), "0 bytes"),
        (formatting.format_bytes(1023), "0.999 KiB"),
        (formatting.format_duration(0.9996), "1,000 ms"),
        (formatting.format_bytes(1.25 * 2**30), "1.25 GiB"),
        (formatting.format_bytes(2**51), "2,048 TiB"),
        (formatting.format_percent(None), "unknown"),
        (formatting.format_percent(0.125), "12.5%"),
        (formatting.format_count(None), "unknown"),
        (formatting.format_time(0.0), "1970-01-01 00:00:00"),
        (formatting.format_time(1e30), "unknown"),
        (formatting.format_value({"a": [1, None], "b": {}}), "a 1; unknown, b nothing"),
        (counted(1, "step"), "1 step"),
        (counted(2000, "step"), "2,000 steps"),
    ],
)
def test_values_are_formatted_with_units(formatted, text):
    assert formatted == text
