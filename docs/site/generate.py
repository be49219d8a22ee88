"""The sources of the site: pages of docs/, README, CHANGELOG, results and notebooks, and the
reference.

The reference is read from the code. `make docs` runs this before Sphinx. A link that leads nowhere
is an error.
"""

import dataclasses
import inspect
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from optimus_jax.config import Config
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.described import fields_of, parts_of, unit_of
from optimus_jax.devices.jax_settings import REFUSED, REPORTED, SET_HERE
from optimus_jax.faults.stopping import EXIT_CODES
from optimus_jax.plan import Pipelining, Plan
from optimus_jax.run_directory.contents import COMMON, EVENTS, FILES, SWITCH_RECORDS
from optimus_jax.run_directory.step_record import StepRecord

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NOTEBOOKS = ROOT / "notebooks"
IMAGES = ROOT / "docs" / "images"
NOT_HERE = "\0"
"""Marks the path of a link to a file that the site does not have."""
LABELLED = re.compile(rf"\[([^\[\]]*)\]{NOT_HERE}\(([^)]*)\)")
LINK = re.compile(r"\]\((?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?\)")
"""A link to a file, and where in it."""


def code(text: str) -> str:
    """Text as code, or nothing."""
    return f"`{text}`" if text else ""


def table(header: str, rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of a table; header cells are separated by `|`."""
    return [
        f"| {header} |",
        "|---" * (header.count("|") + 1) + "|",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
        "",
    ]


def settings_page() -> str:
    """Every setting: its name on the command line, type, unit, default and meaning."""
    sections = {
        each.name: each.default_factory
        for each in dataclasses.fields(Config)
        if isinstance(each.default_factory, type) and dataclasses.is_dataclass(each.default_factory)
    }
    lines = ["# Settings", "", "Each is set by `--set NAME=VALUE`, in Python or in JSON.", ""]
    for prefix, section in [("", Config), *((f"{name}.", each) for name, each in sections.items())]:
        lines += [f"## {prefix.rstrip('.') or 'run'}", ""]
        lines += table(
            "name | type | unit | default | meaning",
            (
                (f"`{prefix}{name}`", kind, unit_of(name, kind), code(default), meaning)
                for name, kind, default, meaning in fields_of(section)
                if name not in sections
            ),
        )
        for part in parts_of(section) if section is not Config else ():
            lines += [f"### {part.__name__}", "", inspect.cleandoc(part.__doc__ or ""), ""]
            lines += table(
                "field | type | unit | default | meaning",
                (
                    (f"`{name}`", kind, unit_of(name, kind), code(default), meaning)
                    for name, kind, default, meaning in fields_of(part)
                ),
            )
    return "\n".join(lines)


def described(value: type) -> list[str]:
    """A table of the fields of a class."""
    return table(
        "field | type | meaning",
        ((f"`{name}`", kind, meaning) for name, kind, _, meaning in fields_of(value)),
    )


LOGS_GROW = (
    "Files other than logs are replaced as a whole. `events.jsonl` and `switches.jsonl` only grow.",
    "`metrics.jsonl` grows too, except when a run goes back to an older checkpoint: the lines of",
    "later steps then move to `metrics.abandoned.jsonl`. A start removes a half-written last line.",
)


def run_directory_page() -> str:
    """What a run writes: its files, and every field of each."""
    lines = ["# Run directory", "", *LOGS_GROW, ""]
    lines += table("file | content", ((f"`{name}`", text) for name, text in FILES.items()))
    lines += ["## metrics.jsonl", ""]
    lines += ["A line for each step. Numbers that are not finite are null.", ""]
    lines += described(StepRecord)
    lines += ["## events.jsonl", "", "A line for each event. Every event has these fields:", ""]
    lines += table("field | meaning", ((f"`{name}`", text) for name, text in COMMON.items()))
    for event, kind in EVENTS.items():
        lines += [f"### {event}", "", kind.when, ""]
        lines += table(
            "field | meaning", ((f"`{name}`", text) for name, text in kind.fields.items())
        )
    lines += ["## switches.jsonl", "", "The field `record` names the kind of a line."]
    lines += ["`time_s`, seconds since 1970, says when it was written.", ""]
    for record, (when, fields) in SWITCH_RECORDS.items():
        lines += [f"### {record}", "", when, ""]
        lines += table("field | meaning", ((f"`{name}`", text) for name, text in fields.items()))
    lines += [
        "## faults",
        "",
        "A file for each process, `PROCESS.jsonl`. Its lines have the fields",
    ]
    lines += ["of the event [fault](#fault).", ""]
    lines += ["## config.json", ""]
    lines += ["Every setting, by section ([Settings](settings.md)), and `derived`: the values that"]
    lines += ["the run chose for settings that were left open, by the setting's name.", ""]
    lines += ["## plan.json", "", "The plan in use.", "", *described(Plan)]
    lines += ["`axes`:", "", *described(AxisSizes), "`pipeline`:", "", *described(Pipelining)]
    return "\n".join(lines)


def exit_codes_page() -> str:
    """Every exit code of a command."""
    lines = [
        "# Exit codes",
        "",
        "| code | what happened | restart with --resume? |",
        "|---|---|---|",
    ]
    for code, (what, restarts) in sorted(EXIT_CODES.items()):
        lines.append(f"| {code} | {what} | {'yes' if restarts else 'no'} |")
    lines += [
        "",
        "`optimus launch` ends with the code of the first process that failed. If a signal ended",
        "that process, its code is 128 plus the signal's number, as in a shell.",
    ]
    return "\n".join(lines) + "\n"


def jax_settings_page() -> str:
    """What a run does about each of JAX's own settings."""

    def allowed(values: Iterable[object]) -> str:
        return ", ".join(f"`{value!r}`" for value in values)

    lines = ["# JAX settings", "", "Settings of JAX hold for a whole program. In the environment a"]
    lines += [
        "name is upper case (`JAX_ENABLE_X64`). All other settings do not change a result.",
        "",
    ]
    lines += ["## Refused", "", "A run starts only with an allowed value.", ""]
    lines += table(
        "setting | allowed | what another value does",
        ((f"`{name}`", allowed(each.needed), each.why) for name, each in REFUSED.items()),
    )
    lines += ["## Shown at the start", ""]
    lines += table("setting | what it changes", ((f"`{n}`", what) for n, what in REPORTED.items()))
    lines += ["## Without effect", "", "A run passes its own value where JAX would use them.", ""]
    lines += table("setting | instead", ((f"`{name}`", what) for name, what in SET_HERE.items()))
    return "\n".join(lines)


REFERENCE = {
    "Python API": "reference/api.md",
    "Settings": "reference/settings.md",
    "Run directory": "reference/run-directory.md",
    "Exit codes": "reference/exit-codes.md",
    "JAX settings": "reference/jax-settings.md",
}
"""Pages that exist on the site only: other pages name them in italics."""
INDEXES = {
    ROOT / "docs" / "decisions": "decisions",
    ROOT / "docs" / "howto": "howto",
    ROOT / "docs" / "tutorials": "tutorials",
    NOTEBOOKS: "notebooks",
    RESULTS: "results",
}
"""Folders of pages -> the folder on the site, whose index lists them."""
NAMED = re.compile(rf"\*({'|'.join(REFERENCE)})\*")


def moved(text: str, here: Path, place: str) -> str:
    """Text of a file whose links are those of the page that it becomes.

    A link to a file that the site does not have becomes its path.

    Raises:
      FileNotFoundError: a link leads nowhere, or to a folder of pages that has no index.
    """
    up = "../" * place.count("/")

    def link(match: re.Match[str]) -> str:
        path, anchor = (here.parent / match[1]).resolve(), match[2] or ""
        if not path.exists():
            raise FileNotFoundError(f"{here}: no such file: {match[1]}")
        if path == ROOT / "README.md":
            return f"]({up}index.md{anchor})"
        if path in INDEXES:
            return f"]({up}{INDEXES[path]}/index.md)"
        if path.is_dir() and any(path.glob("*.md")):
            raise FileNotFoundError(f"{here}: {match[1]} has no index on the site")
        if path.is_relative_to(ROOT / "docs") and path.suffix == ".md":
            return f"]({up}{path.relative_to(ROOT / 'docs')}{anchor})"
        if path == RESULTS / "README.md":
            return f"]({up}results/index.md)"
        if path.parent == RESULTS:
            return f"]({up}results/{path.name}{anchor})"
        if path.parent == NOTEBOOKS:
            return f"]({up}notebooks/{path.name})"
        if path.parent == IMAGES:
            return f"]({up}images/{path.name})"
        if path.name in ("CHANGELOG.md", "CONTRIBUTING.md"):
            return f"]({up}{path.name.lower()}{anchor})"
        return f"]{NOT_HERE}({path.relative_to(ROOT)})"

    text = LABELLED.sub(unlinked, LINK.sub(link, text))
    return NAMED.sub(lambda match: f"[{match[1]}]({up}{REFERENCE[match[1]]})", text)


def unlinked(match: re.Match[str]) -> str:
    """The label of a link to a file that the site does not have, and the file's path."""
    label, path = match[1], match[2]
    return f"`{path}`" if label.strip("`") == path else f"{label} (`{path}`)"


API = """# Python API

```{eval-rst}
.. autofunction:: optimus_jax.train
.. autoclass:: optimus_jax.RunResult
   :members:
.. autofunction:: optimus_jax.training_loop
.. autoclass:: optimus_jax.TrainingLoop
   :members:
   :special-members: __iter__
   :exclude-members: close, end, abandon, stop_tracing
.. autofunction:: optimus_jax.find_plans
.. autofunction:: optimus_jax.explain_plan
.. autoclass:: optimus_jax.Callback
   :members:
.. autoclass:: optimus_jax.RunInfo
   :members:
.. autoclass:: optimus_jax.StepRecord
   :members:
.. autoclass:: optimus_jax.EvalRecord
   :members:
.. autofunction:: optimus_jax.evaluate
.. autoclass:: optimus_jax.EvaluationResult
   :members:
.. autofunction:: optimus_jax.load
.. autoclass:: optimus_jax.LoadedModel
   :members:
.. autofunction:: optimus_jax.export
.. autoclass:: optimus_jax.ExportResult
   :members:
.. autofunction:: optimus_jax.show_mesh
.. autoclass:: optimus_jax.MeshView
   :members:
.. autoclass:: optimus_jax.RankedPlan
   :members:
.. autoclass:: optimus_jax.Plan
   :members:
.. autoclass:: optimus_jax.Task
   :members:
.. autoclass:: optimus_jax.ModelConfig
.. autoclass:: optimus_jax.Config
   :members: to_json, from_json, with_values
.. autoexception:: optimus_jax.OptimusError
.. autoexception:: optimus_jax.FaultError
```
"""
TUTORIALS = [
    "first_run",
    "your_own_data",
    "plan_for_a_cluster",
    "watch_a_run",
    "stop_move_resume",
    "several_hosts",
]
"""In the order in which to read them."""
HOWTOS = [f"howto/{each.stem}" for each in sorted((ROOT / "docs" / "howto").glob("*.md"))]
GUIDES = [
    "running",
    "tuning",
    "data",
    "planning",
    "extending",
    "clusters",
    "stores",
    "control",
    "pipelines",
    "gpus",
    "faults",
    "names",
]
EXPLANATION = ["architecture", "decisions/index", "measured", "results/index"]


def contents(caption: str, names: Iterable[str]) -> str:
    """A part of the table of contents."""
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""])


def pages() -> Iterator[tuple[str, str]]:
    """Name and text of every page."""
    yield "reference/settings.md", settings_page()
    yield "reference/run-directory.md", run_directory_page()
    yield "reference/exit-codes.md", exit_codes_page()
    yield "reference/jax-settings.md", jax_settings_page()
    yield "reference/api.md", API
    decisions = sorted(each.stem for each in (ROOT / "docs" / "decisions").glob("*.md"))
    yield (
        "decisions/index.md",
        "\n".join(["# Decisions", "", "```{toctree}", *decisions, "```", ""]),
    )
    yield "tutorials/index.md", index_page("Tutorials", [f"{name}.md" for name in TUTORIALS])
    yield "howto/index.md", index_page("How-tos", [f"{Path(name).name}.md" for name in HOWTOS])
    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    yield "notebooks/index.md", index_page("Notebooks", [each.name for each in notebooks])
    results = sorted(each.stem for each in RESULTS.glob("*.md") if each.stem != "README")
    index = RESULTS / "README.md"
    yield (
        "results/index.md",
        moved(index.read_text(encoding="utf-8"), index, "results/index.md")
        + "\n".join(["", "```{toctree}", ":hidden:", "", *results, "```", ""]),
    )
    copied = {ROOT / name: name.lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
    copied |= {RESULTS / f"{name}.md": f"results/{name}.md" for name in results}
    docs = ROOT / "docs"
    copied |= {each: str(each.relative_to(docs)) for each in docs.rglob("*.md")}
    for path, place in copied.items():
        yield place, moved(path.read_text(encoding="utf-8"), path, place)
    readme = ROOT / "README.md"
    yield (
        "index.md",
        moved(readme.read_text(encoding="utf-8"), readme, "index.md")
        + "\n"
        + contents("Tutorials", [f"tutorials/{name}" for name in TUTORIALS])
        + contents("Guides", GUIDES)
        + contents("How to", HOWTOS)
        + contents("Explanation", EXPLANATION)
        + contents("Reference", [page.removesuffix(".md") for page in REFERENCE.values()])
        + contents("Notebooks", [f"notebooks/{each.stem}" for each in notebooks])
        + contents("More", ["contributing", "changelog"]),
    )


def index_page(title: str, names: Iterable[str]) -> str:
    """Links to the pages of a folder, each by its title."""
    return (
        "\n".join(
            ["---", "orphan: true", "---", "", f"# {title}", ""]
            + [f"* [](./{name})" for name in names]
        )
        + "\n"
    )


def main(target: Path) -> None:
    """Write all pages, the files beside results, the notebooks and images into an empty
    directory."""
    shutil.rmtree(target, ignore_errors=True)
    for name, text in pages():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text, encoding="utf-8")
    for each in RESULTS.iterdir():
        if each.suffix != ".md":
            shutil.copy(each, target / "results" / each.name)
    for each in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(each, target / "notebooks")
    shutil.copytree(IMAGES, target / "images")
    shutil.copy(Path(__file__).with_name("conf.py"), target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
