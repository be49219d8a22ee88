"""What encoders learn of Python's own library: masked or replaced bytes, then labels of excerpts.

    python benchmarks/encoder_learning.py --work DIR

Two tasks of labels, on excerpts of whole lines:

* order: whether the words are as they were written, or in another order. Both kinds have the same
  words, so that no bag of words can tell them apart.
* package: from which package of the library the excerpt is.

Each is learnt by bert-nano from the parameters of the masked run, by electra-nano from those of a
run that found replaced bytes, by bert-nano from new parameters, and by logistic regression over a
bag of words (scikit-learn). All see the same excerpts; files that
are held out of the labels are in none of the excerpts to learn from, and their text is not learnt
before either. A second call goes on where the first one ended.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
EXCERPT_BYTES = (80, 120)
"""Least and most bytes of an excerpt."""
PACKAGES = ("asyncio", "email", "encodings", "multiprocessing", "tkinter", "xml")
HELD_OUT = 5
"""Every file whose number is a multiple of this is held out."""
WORD = re.compile(r"\w+|[^\w\s]")
SEQ_LEN, GLOBAL_BATCH = 128, 32
SHARED = ("--mesh", "data=1", "--remat", "none", "--control", "off")
"""Flags of every run."""


def library_files() -> list[Path]:
    """The library's files that can be read, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "test", "tests", "idlelib"} & {*path.parts}
    )


def excerpts(path: Path) -> Iterator[list[str]]:
    """Runs of lines of a file, none twice."""
    least, most = EXCERPT_BYTES
    found: list[str] = []
    for line in path.read_text(errors="ignore").splitlines():
        if not line.strip() or not line.isascii():
            continue
        found.append(line.strip())
        size = len("\n".join(found))
        if size > most:
            found = []
        elif size >= least and len(found) >= 3:
            yield found
            found = []


def records_of(task: str, files: list[Path], most: int, seed: int) -> list[dict[str, str]]:
    """Excerpts with labels, as many of each."""
    draw, by_label = random.Random(seed), {}
    for path in files:
        for lines in excerpts(path):
            if task == "package":
                names = [name for name in PACKAGES if name in path.parts]
                if names:
                    by_label.setdefault(names[0], []).append("\n".join(lines))
                continue
            words = WORD.findall(" ".join(lines))
            while len(" ".join(words)) > EXCERPT_BYTES[1]:
                words.pop()
            is_written = draw.random() < 0.5
            if not is_written:
                draw.shuffle(words)
            label = "written" if is_written else "shuffled"
            by_label.setdefault(label, []).append(" ".join(words))
    number = min(most // len(by_label), *map(len, by_label.values()))
    records = [
        {"text": text, "label": label}
        for label, texts in sorted(by_label.items())
        for text in draw.sample(texts, number)
    ]
    draw.shuffle(records)
    return records


def write_data(work: Path) -> None:
    """Texts to restore, and excerpts with labels to learn from and to be measured by."""
    files = library_files()
    held_out = files[::HELD_OUT]
    learnt = [path for path in files if path not in {*held_out}]
    texts = [{"text": path.read_text(errors="ignore")} for path in learnt]
    for name, records in (
        ("masked", texts),
        ("order", records_of("order", learnt, 16_000, 0)),
        ("order-held-out", records_of("order", held_out, 2000, 1)),
        ("package", records_of("package", learnt, 16_000, 0)),
        ("package-held-out", records_of("package", held_out, 2000, 1)),
    ):
        path = work / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run(work: Path, name: str, *more: str) -> float:
    """Train a run, or what is left of it. Returns the seconds of its steps."""
    command = [
        *(sys.executable, str(SCRIPTS / "train.py"), "--run-dir", str(work / name)),
        *("--resume", "auto", "--seq-len", str(SEQ_LEN), "--global-batch", str(GLOBAL_BATCH)),
    ]
    subprocess.run([*command, *more], check=True)
    lines = (work / name / "metrics.jsonl").read_text().splitlines()
    return sum(json.loads(line)["step_time_s"] for line in lines)


def accuracy_of(work: Path, run_name: str, task: str) -> float:
    """Of a run's model on the excerpts that are held out."""
    found = work / f"{run_name}-evaluation.json"
    if not found.exists():
        data = str(work / f"{task}-held-out.jsonl")
        command = [sys.executable, str(SCRIPTS / "evaluate.py"), "--run", str(work / run_name)]
        printed = subprocess.run(
            [*command, "--data", data, "--mesh", "data=1", "--json"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        found.write_text(printed)
    return json.loads(found.read_text())["metrics"]["accuracy"]


def bag_of_words(work: Path, task: str) -> float:
    """Accuracy of logistic regression over words, and over pairs of neighbouring words too."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    learnt, held_out = (
        [json.loads(line) for line in (work / f"{name}.jsonl").read_text().splitlines()]
        for name in (task, f"{task}-held-out")
    )
    words = CountVectorizer(token_pattern=WORD.pattern, lowercase=False, min_df=2)
    model = make_pipeline(words, LogisticRegression(max_iter=1000))
    model.fit([each["text"] for each in learnt], [each["label"] for each in learnt])
    return model.score([each["text"] for each in held_out], [each["label"] for each in held_out])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for data and runs")
    parser.add_argument(
        "--steps", type=int, default=1000, help="of the runs before labels (default: 1000)"
    )
    parser.add_argument(
        "--label-steps", type=int, default=300, help="of each run with labels (default: 300)"
    )
    parser.add_argument(
        "--starts",
        nargs="+",
        choices=("masked", "replaced", "new"),
        default=("masked", "replaced", "new"),
        help="parameters that labels are learnt from (default: all)",
    )
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "masked.jsonl").exists():
        write_data(work)
    rows: list[tuple[str, float, float | None]] = []
    for name, model in (("masked", "bert-nano"), ("replaced", "electra-nano")):
        if name not in options.starts:
            continue
        steps_s = run(
            work,
            f"{name}-run",
            *("--model", model),
            *("--data", str(work / "masked.jsonl")),
            *("--steps", str(options.steps)),
            *SHARED,
        )
        rows.append((f"{name} bytes", steps_s, None))
    for task in ("order", "package"):
        labels = sorted({json.loads(line)["label"] for line in (work / f"{task}.jsonl").open()})
        for name, start in (
            ("masked before", ["--init-from", str(work / "masked-run")]),
            ("replaced before", ["--init-from", str(work / "replaced-run")]),
            ("new parameters", ["--model", "bert-nano"]),
        ):
            if name.split()[0] not in options.starts:
                continue
            run_name = f"{task}-{name.replace(' ', '-')}"
            steps_s = run(
                work,
                run_name,
                *start,
                *("--task", "classification"),
                *("--data", str(work / f"{task}.jsonl")),
                *("--set", f"model.labels={','.join(labels)}"),
                *("--steps", str(options.label_steps)),
                *("--lr", "5e-4"),
                *SHARED,
            )
            rows.append((f"{task}, {name}", steps_s, accuracy_of(work, run_name, task)))
        rows.append((f"{task}, bag of words", 0.0, bag_of_words(work, task)))
    for name, steps_s, accuracy in rows:
        shown = "" if accuracy is None else f"{accuracy:.1%}"
        print(f"{name:<28} {steps_s:7.0f} s  {shown}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
