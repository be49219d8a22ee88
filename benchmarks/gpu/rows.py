"""Rows of figures: which row of a case is used, and the tables made of them."""

import itertools
import json
import subprocess
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from optimus_jax.devices.accelerators import accelerator_of_kind

NAMES = {
    "ours": "optimus_jax",
    "eager": "PyTorch, eager",
    "compile": "PyTorch, torch.compile",
    "matmul": "matrix product alone",
}
CONVENTION = (
    "Model FLOPs are counted alike for all (optimus_jax/models/flops.py): 6 for each token and"
    " element of a matrix that it is multiplied by (projections, feed-forward and head, but not the"
    " embedding's rows), and the causal half of attention. Recomputing counts nothing. A row of"
    " tokens is one document unless the case says packed, which is the default of a run. PyTorch's"
    " autocast keeps residuals and norms in float32; ours are in bf16. PyTorch's compile time is"
    " the time of its first step minus that of a usual step."
)
GIB = 2**30


def commit_here() -> str:
    """The checkout's commit, with a + if files were changed; empty: this is not a checkout."""
    try:
        asked = [
            "git",
            "-C",
            str(Path(__file__).parent),
            "describe",
            "--always",
            "--exclude=*",
            "--dirty=+",
        ]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def rows_of(out: Path) -> list[dict]:
    """The rows of a file; none if it does not exist."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def identity(row: dict) -> Hashable:
    """The key that rows share if they measure the same case, whatever the commit."""
    return row["machine"], row["who"], row["name"], row["flags"]


def is_of_commit(row: dict, commit: str) -> bool:
    """Whether a row has figures of this commit; always False if the commit is not known."""
    return is_known(commit) and has_figures(row) and row.get("commit") == commit


def is_known(commit: str) -> bool:
    """Whether a commit can be checked out: it has a name, and no files were changed."""
    return bool(commit) and not commit.endswith("+")


def has_figures(row: dict) -> bool:
    """Whether a row was measured: it neither failed nor was left out."""
    return row.keys().isdisjoint(("failed", "left_out"))


def is_done(rows: Iterable[dict], asked: dict) -> bool:
    """Whether `rows` have figures of this case at this commit."""
    return any(
        is_of_commit(row, asked["commit"]) and identity(row) == identity(asked) for row in rows
    )


def newest(rows: Iterable[dict]) -> list[dict]:
    """The last row of each case, in the order in which the cases first appear.

    A failure does not replace figures of the same commit. A row that was left out replaces nothing.
    """
    found: dict[Hashable, dict] = {}
    for row in rows:
        before = found.get(identity(row), {"left_out": "", "commit": ""})
        if has_figures(row) or (
            "left_out" in before
            if "left_out" in row
            else not has_figures(before) or before["commit"] != row["commit"]
        ):
            found[identity(row)] = row
    return list(found.values())


def report(rows: Sequence[dict]) -> str:
    """A table for each GPU, with the meaning and the source of the figures."""
    parts = []
    for machine, of_card in itertools.groupby(
        sorted(newest(rows), key=lambda row: row["machine"]), key=lambda row: row["machine"]
    ):
        here = list(of_card)
        parts += [
            f"## {machine}",
            table(here),
            "\n".join([*peaks(here), CONVENTION, *options(here)]),
            provenance(here),
        ]
    return "\n\n".join(parts)


def table(rows: Sequence[dict]) -> str:
    """The rows as a Markdown table.

    It has a column for commits if they differ, and one for XLA_FLAGS if there are any.
    """
    more = {
        "commit": len({row["commit"] for row in rows}) > 1,
        "flags": any(row["flags"] for row in rows),
    }
    extra = {
        title: column
        for title, column in (("commit", "commit"), ("XLA_FLAGS", "flags"))
        if more[column]
    }
    titles = [
        "case",
        "by",
        "step: median (least, most)",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "peak memory (predicted)",
        "compile",
        "attention",
        *extra,
    ]
    lines = [_line(titles), "|" + "---|" * len(titles)]
    return "\n".join(
        [
            *lines,
            *(
                _line(
                    [
                        row["name"],
                        NAMES[row["who"]],
                        *_figures(row),
                        *(row[column] or "-" for column in extra.values()),
                    ]
                )
                for row in rows
            ),
        ]
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figures(row: dict) -> list[str]:
    if not has_figures(row):
        return [
            f"failed: {row['failed']}" if "failed" in row else f"left out: {row['left_out']}",
            *[""] * 6,
        ]
    accelerator = accelerator_of_kind(row["device"])
    mfu = (
        f"{row['tflops'] * 1e12 / accelerator.dense_peak_flops:.1%}"
        if accelerator and accelerator.dense_peak_flops
        else "-"
    )
    least, most = row["spread_s"]
    calls = ", ".join(
        f"{count} {name}" for name, count in row.get("custom_calls", {}).items() if count
    )
    return [
        f"{1e3 * row['step_s']:.1f} ms ({1e3 * least:.1f}, {1e3 * most:.1f})",
        f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "-",
        f"{row['tflops']:.0f}",
        mfu,
        _memory(row),
        f"{row['compile_s']:.0f} s" if row.get("compile_s") is not None else "-",
        f"{row.get('attention', '-')}{calls and f': {calls}'}",
    ]


def _memory(row: dict) -> str:
    """Peak memory, and the predicted one.

    The device reports the peak since the process started. If it was reached before the steps, it is
    an upper bound of theirs.
    """
    peak, before, predicted = (
        row.get(name) or 0 for name in ("peak_bytes", "peak_before_steps_bytes", "predicted_bytes")
    )
    most = (
        ""
        if not peak
        else (
            f"{peak / GIB:.1f} GiB"
            if peak > before
            else f"at most {peak / GIB:.1f} GiB, reached before the steps"
        )
    )
    return f"{most or '-'}{f' ({predicted / GIB:.1f})' if predicted else ''}"


def peaks(rows: Iterable[dict]) -> list[str]:
    """For each accelerator, the peak that MFU refers to."""
    kinds = dict.fromkeys(row["device"] for row in rows if "device" in row)
    known = [each for each in map(accelerator_of_kind, kinds) if each and each.dense_peak_flops]
    return [
        f"MFU: of {each.dense_peak_flops / 1e12:,.0f} TFLOP/s, dense bf16 ({each.sources[0]})."
        for each in known
        if each.dense_peak_flops
    ]


def options(rows: Iterable[dict]) -> list[str]:
    """The XLA options of our cases and their reasons, each once."""
    values: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for text, why, source in row.get("options", ()):
            name, _, value = text.partition("=")
            values.setdefault((name, f"{why} ({source})"), {})[value] = None
    return [f"`{name}={'`, `'.join(found)}`: {why}" for (name, why), found in values.items()]


def provenance(rows: Iterable[dict]) -> str:
    """The dates, commits, versions and commands of the rows."""
    rows = list(rows)
    return "\n".join(
        [
            *dict.fromkeys(
                f"{row['date']}, commit {row['commit'] or 'unknown'}, {row['machine']}:"
                f" `{row['command']}`"
                for row in rows
            ),
            *dict.fromkeys(
                f"{NAMES[row['who']]}: {row['version']}" for row in rows if "version" in row
            ),
        ]
    )
