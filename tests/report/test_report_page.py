"""The report page as written by the script and opened in a browser."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import SCRIPTS, run_in_process
from sample_run import LAST_WHY, write_run

pytest.importorskip("plotly")

SCRIPT = SCRIPTS / "report.py"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None,
    reason=(
        f"no Chromium found, by none of the names {', '.join(NAMES)} (on Debian: apt-get install"
        " chromium)"
    ),
)
DARK, LIGHT = (f"--blink-settings=preferredColorScheme={number}" for number in (0, 1))
PROBE = """<script>
addEventListener("load", () => setTimeout(() => {
  const box = element => element.getBoundingClientRect();
  const visible = {opacityProperty: true, visibilityProperty: true};
  const seen = element =>
    element.checkVisibility(visible) && box(element).height > 8 && box(element).width > 8;
  const overlap = (one, other) =>
    one.left < other.right - 1 && other.left < one.right - 1 &&
    one.top < other.bottom - 1 && other.top < one.bottom - 1;
  const clashes = elements => elements.flatMap((one, index) => elements.slice(index + 1)
    .filter(other => overlap(box(one), box(other)))
    .map(other => [one.textContent.slice(0, 40), other.textContent.slice(0, 40)]));
  const all = (part, selector) => [...part.querySelectorAll(selector)];
  const texts = ".xtick text, .ytick text, .xtitle, .ytitle, .annotation-text, .legendtext";
  const seenHere = {
    charts: all(document, ".chart").map(chart => ({
      name: chart.dataset.name,
      visible: seen(chart),
      width: box(chart).width,
      drawn: all(chart, ".trace path")
        .filter(path => box(path).width + box(path).height > 4).length,
      clashes: clashes(all(chart, texts).filter(text => box(text).width > 0)),
      fits: all(chart, texts).every(text =>
        box(text).left >= box(chart).left - 1 && box(text).right <= box(chart).right + 1)})),
    sections: clashes(all(document, "main > *")),
    why: all(document, "#last-decision .why").filter(seen).map(part => part.textContent),
    fits: document.documentElement.scrollWidth <= window.innerWidth,
    loaded: performance.getEntriesByType("resource").map(entry => entry.name),
    paper: getComputedStyle(document.body).backgroundColor,
    ink: all(document, ".xtick text").map(text => getComputedStyle(text).fill)};
  top.postMessage(JSON.stringify(seenHere), "*");
}, 500));
</script>"""
"""Script that records what the browser shows."""
FRAME = """<!doctype html><style>* {{ margin: 0; border: 0 }}</style>
<iframe src="{name}" width="{width}" height="{height}"></iframe>
<script>addEventListener("message", event => {{
  const said = document.createElement("pre");
  said.id = "probe";
  said.textContent = event.data;
  document.body.append(said);
}});</script>"""
"""Page that shows another one at any width: a window of Chromium has at least 500 pixels."""
PHONE, DESKTOP = (390, 844), (1000, 800)
"""Width and height in pixels."""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run = write_run(folder / "sample")  # left open: a report needs no lock
    done = subprocess.run(
        [sys.executable, SCRIPT, run.path, "--out", folder / "page.html"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert str(folder / "page.html") in done.stdout
    run.close()
    return folder / "page.html"


def browse(page: Path, *flags: str) -> tuple[str, list[str]]:
    """The document after the browser has loaded it, and the browser's console messages."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={page.parent / 'profile'}",
            "--enable-logging=stderr",
            "--window-size=1000,800",
            "--virtual-time-budget=20000",
            *flags,
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def probed(page: Path, *flags: str, window: tuple[int, int] = DESKTOP) -> dict:
    copy, frame = page.with_name("probed.html"), page.with_name("frame.html")
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    copy.write_text(text.replace("</body>\n</html>", f"{PROBE}</body>\n</html>"))
    width, height = window
    frame.write_text(FRAME.format(name=copy.name, width=width, height=height))
    document, console_messages = browse(frame, *flags)
    assert not console_messages
    found = re.search('<pre id="probe">(.*?)</pre>', document, re.DOTALL)
    assert found is not None
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@needs_browser
def test_the_page_opens_without_browser_errors(page):
    document, console_messages = browse(page)
    assert "</html>" in document
    assert not console_messages


@needs_browser
def test_browser_errors_are_detected(page):
    broken = page.with_name("broken.html")
    loads = '<script src="http://localhost/x.js"></script></body>'
    broken.write_text(page.read_text().replace("</body>", loads))
    assert any("Content Security Policy" in line for line in browse(broken)[1])


@needs_browser
@pytest.mark.parametrize("window", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_charts_are_drawn_and_nothing_overlaps(page, window):
    seen = probed(page, window=window)
    names = {chart["name"] for chart in seen["charts"]}
    assert {"loss", "times", "quantities", "predictions", "memory", "switch0"} <= names
    check_page(seen, window)
    assert seen["why"] == [LAST_WHY]


@needs_browser
def test_pages_of_several_runs_and_of_plans_fit_a_phone(tmp_path):
    write_run(tmp_path / "a").close()
    write_run(tmp_path / "b").close()
    compared, plans = tmp_path / "compared.html", tmp_path / "plans.html"
    done = run_in_process("report", tmp_path / "a", tmp_path / "b", "--out", compared)
    assert done.returncode == 0, done.stderr
    flags = ("--model", "gpt2", "--schedule", "1f1b", "--remat", "none")
    clusters = ("--compare", "h100:8", "h200:8")
    done = run_in_process("plan", *clusters, *flags, "--html", plans)
    assert done.returncode == 0, done.stderr
    for other, least in ((compared, {"loss", "times"}), (plans, set())):
        seen = probed(other, window=PHONE)
        assert least <= {chart["name"] for chart in seen["charts"]}
        check_page(seen, PHONE)


def check_page(seen: dict, window: tuple[int, int]) -> None:
    """Check that every chart is drawn, that nothing overlaps, and that all fits the window."""
    assert seen["charts"]
    for chart in seen["charts"]:
        assert chart["visible"], chart
        assert chart["width"] > min(400, 0.8 * window[0]), chart
        assert chart["drawn"] > 0, chart
        assert not chart["clashes"], chart
        assert chart["fits"], chart
    assert not seen["sections"]
    assert seen["fits"], "the page is not wider than its window"
    assert seen["loaded"] == []


@needs_browser
def test_the_page_follows_the_dark_colour_scheme(page):
    def brightness(colour: str) -> int:
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    light, dark = probed(page, LIGHT), probed(page, DARK)
    assert brightness(light["paper"]) > 700
    assert brightness(dark["paper"]) < 150
    assert max(map(brightness, light["ink"])) < 200
    assert min(map(brightness, dark["ink"])) > 500


def test_the_page_is_written_into_the_run_directory_by_default(tmp_path):
    write_run(tmp_path / "run").close()
    subprocess.run([sys.executable, SCRIPT, tmp_path / "run"], check=True, timeout=120)
    # A page that is there is replaced.
    assert run_in_process("report", tmp_path / "run").returncode == 0
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert not list((tmp_path / "run").glob("*.tmp"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-run",), "no run to report on[\\s\\S]*no-such-run"),
        (("run", "--out", "metrics.jsonl"), "must end in .html[\\s\\S]*metrics.html"),
        (("run", "--out", "no-such-folder/a.html"), "cannot be written[\\s\\S]*no-such-folder"),
    ],
)
def test_user_mistakes_end_with_one_message(tmp_path, arguments, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    failed = run_in_process("report", *arguments, cwd=tmp_path)
    assert failed.returncode == 2
    assert re.search(message, failed.stderr), failed.stderr
    assert "Traceback" not in failed.stderr
    assert "do: " in failed.stderr


def test_without_plotly_the_error_names_what_to_install(tmp_path):
    write_run(tmp_path / "run").close()
    (tmp_path / "plotly").mkdir()
    (tmp_path / "plotly" / "__init__.py").write_text(
        "raise ModuleNotFoundError('No module named plotly')"
    )
    failed = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "run"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert failed.returncode == 2, failed.stderr
    assert "pip install 'optimus-jax[plots]'" in failed.stderr
