"""The page of the planner has every plan, its frontier and its reasons, and needs no network."""

import pytest
from in_process import run_in_process
from viz.test_frontier import fake

from optimus_jax.report.plan_page import plan_page
from optimus_jax.viz.frontier import GIB

pytest.importorskip("plotly")


def test_the_page_has_each_plan_and_what_it_says_is_escaped():
    plans = [fake(1, 3 * GIB, rank=1), fake(2, GIB, rank=2), fake(3, 3.5 * GIB, rank=3)]
    cells = [{"": str(n), "mesh": "data=8", "why": f"<b>{n}</b> & more"} for n in (1, 2, 3)]
    text = plan_page(
        {"h100:8": plans, "h200:8": []},
        {"h100:8": cells, "h200:8": []},
        title="Plans <1>",
        notes=["predicted"],
        capacity_bytes=80 * GIB,
    )
    assert "<title>Plans &lt;1&gt;</title>" in text
    assert "&lt;b&gt;3&lt;/b&gt; &amp; more" in text
    assert text.count('<tr class="marked">') == 2
    assert text.count("<caption>") == 1, "a cluster without a plan has no table"
    assert "rank 3: data=4, tensor=2" in text, "as a tooltip"
    assert "<script src=" not in text


def test_the_command_writes_it_beside_the_table(tmp_path):
    flags = ("--model", "gpt2", "--schedule", "1f1b", "--remat", "none")
    page = tmp_path / "plans.html"
    done = run_in_process("plan", "--cluster", "h100:8", *flags, "--top", "2", "--html", page)
    assert done.returncode == 0, done.stderr
    assert f"wrote {page}" in done.stderr
    text = page.read_text(encoding="utf-8")
    assert "Plans for gpt2: 64 x 1024 tokens" in text
    assert text.count("<tr") > 3, "more plans than the table shows"
    assert "rank 3: " in text
    assert "│ 3 " not in done.stdout
    compared = tmp_path / "compared.html"
    done = run_in_process("plan", "--compare", "h100:8", "h200:8", *flags, "--html", compared)
    assert done.returncode == 0, done.stderr
    assert compared.read_text(encoding="utf-8").count("<caption>") == 2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("plans.json", "must end in .html"),
        ("no/folder/a.html", "cannot be written"),
        ("..", "must end in .html"),
    ],
)
def test_a_page_that_cannot_be_written_is_an_error(name, told, tmp_path):
    flags = ("--model", "gpt2", "--cluster", "h100:8", "--mesh", "data=8", "--remat", "none")
    refused = run_in_process("plan", *flags, "--html", tmp_path / name)
    assert refused.returncode == 2
    assert told in refused.stderr
