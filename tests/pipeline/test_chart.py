"""Charts show every task, and say what they leave out."""

import sys

import pytest
from hypothesis import given
from schedules import schedules

from optimus_jax.errors import ConfigError
from optimus_jax.pipeline.chart import picture, text
from optimus_jax.pipeline.gpipe import forward_only
from optimus_jax.pipeline.interleaved import interleaved
from optimus_jax.pipeline.one_f_one_b import one_f_one_b
from optimus_jax.pipeline.schedule import IDLE

GOLDEN = """\
1f1b: stages 4, microbatches 6, bubble 50.0%, in flight 6
tick       0  1  2  3  4  5  6  7  8  9 10 11
stage 0 F  0  1  2  3  4  5  .  .  .  .  .  .
        B  .  .  .  .  .  .  0  1  2  3  4  5
stage 1 F  .  0  1  2  3  4  5  .  .  .  .  .
        B  .  .  .  .  .  0  1  2  3  4  5  .
stage 2 F  .  .  0  1  2  3  4  5  .  .  .  .
        B  .  .  .  .  0  1  2  3  4  5  .  .
stage 3 F  .  .  .  0  1  2  3  4  5  .  .  .
        B  .  .  .  0  1  2  3  4  5  .  .  .
head       .  .  .  0  1  2  3  4  5  .  .  .
"""

GOLDEN_INTERLEAVED = """\
interleaved: stages 2, microbatches 2, repeats 2, latency 2, bubble 100.0%, in flight 4
tick       0  1  2  3  4  5  6  7  8  9 10 11 12 13
stage 0 F 0a 1a  .  . 0b 1b  .  .  .  .  .  .  .  .
        B  .  .  .  .  .  .  .  . 0b 1b  .  . 0a 1a
stage 1 F  .  . 0a 1a  .  . 0b 1b  .  .  .  .  .  .
        B  .  .  .  .  .  . 0b 1b  .  . 0a 1a  .  .
head       .  .  .  .  .  .  0  1  .  .  .  .  .  .
"""

GOLDEN_CUT = """\
forward: stages 3, microbatches 4, bubble 50.0%
tick      0 1 2 3
stage 0 F 0 1 2 3
stage 1 F . 0 1 2
head      . . 0 1
(not shown: 2 of 6 ticks and 1 of 3 stages)
"""


@pytest.mark.parametrize(
    ("chart", "golden"),
    [
        (text(one_f_one_b(4, 6)), GOLDEN),
        (text(interleaved(2, 2, 2, 2)), GOLDEN_INTERLEAVED),
        (text(forward_only(3, 4), max_ticks=4, max_stages=2), GOLDEN_CUT),
    ],
)
def test_text_charts_equal_the_golden_ones(chart, golden):
    assert chart == golden


@given(schedule=schedules())
def test_a_chart_is_a_grid_with_every_task(schedule):
    lines = text(schedule, max_ticks=schedule.num_ticks).splitlines()[1:]
    assert len({len(line) for line in lines}) == 1
    width = len(f"stage {schedule.num_stages - 1} F")
    entries = [line[width:].split() for line in lines]
    assert {len(row) for row in entries} == {schedule.num_ticks}
    labels = {label for row in entries[1:-1] for label in row if label != "."}
    assert len(labels) == schedule.num_tasks
    num_entries = sum(label != "." for row in entries[1:-1] for label in row)
    assert num_entries == (schedule.forward != IDLE).sum() + (schedule.backward != IDLE).sum()


def test_repeats_beyond_the_alphabet_have_numbers():
    assert " 0z 0[26]" in " ".join(text(forward_only(1, 1, 27)).split())


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=r"not installed(.|\n)*pip install 'optimus-jax\[plots\]'"
    ):
        picture(one_f_one_b(2, 2), tmp_path / "chart.png")


@pytest.mark.parametrize(("name", "magic"), [("chart.png", b"\x89PNG"), ("chart.svg", b"<?xml")])
def test_pictures_are_written_as_png_and_svg(name, magic, tmp_path):
    pytest.importorskip("matplotlib")
    picture(interleaved(2, 2, 2), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert "matplotlib.pyplot" not in sys.modules


def test_picture_of_an_unknown_file_type_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(
        ConfigError, match=r"ends in the kind of its file(.|\n)*chart.xyz(.|\n)*\.png or \.svg"
    ):
        picture(one_f_one_b(2, 2), tmp_path / "chart.xyz")
