"""What whisper-nano learns of words that espeak-ng speaks: word errors of recordings held out.

    python benchmarks/speech_learning.py --work DIR

Each recording is one or two of thirty words, spoken by one of six voices at some pitch and speed.
Those held out are drawn in the same way with another seed. A second call goes on where the first
one ended.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"),
    *("red", "green", "blue", "black", "white", "cat", "dog", "bird", "house", "tree"),
)
VOICES = ("en-us", "en-gb", "en-us+f2", "en-us+m3", "en-gb+f4", "en-us+m7")
SHARED = ("--mesh", "data=1", "--remat", "none", "--control", "off")
"""Flags of the run."""


def speak(folder: Path, number: int, seed: int) -> None:
    """Write recordings and their texts, where they are not yet there."""
    metadata = folder / "metadata.csv"
    if metadata.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(seed), ["file_name,text"]
    for place in range(number):
        words = draw.choices(WORDS, k=draw.choice((1, 1, 2)))
        name = f"{place:05}.wav"
        subprocess.run(
            [
                "espeak-ng",
                *("-v", draw.choice(VOICES)),
                *("-p", str(draw.randint(30, 70))),
                *("-s", str(draw.randint(150, 210))),
                *("-w", str(folder / name)),
                " ".join(words),
            ],
            check=True,
        )
        rows.append(f"{name},{' '.join(words)}")
    metadata.write_text("\n".join(rows) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of recordings and the run")
    parser.add_argument("--steps", type=int, default=1500, help="steps (default: %(default)s)")
    parser.add_argument(
        "--recordings", type=int, default=4000, help="recordings to learn (default: %(default)s)"
    )
    args = parser.parse_args()
    learnt, held_out, run = (args.work / name for name in ("learnt", "held-out", "run"))
    speak(learnt, args.recordings, seed=0)
    speak(held_out, 300, seed=1)
    started = seconds_of_children()
    train = [sys.executable, str(SCRIPTS / "train.py"), "--run-dir", str(run), "--resume", "auto"]
    settings = {
        "data.eval_fraction": 0.02,
        "evaluation.examples": 64,
        "evaluation.transcribed": 0,
        "optimizer.decay_steps": args.steps,
        "model.dropout": 0.1,
    }
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    subprocess.run(
        [
            *train,
            *("--model", "whisper-nano", "--data", str(learnt), "--global-batch", "32"),
            *("--lr", "2e-3", "--steps", str(args.steps)),
            *SHARED,
            *flags,
        ],
        check=True,
    )
    spent = seconds_of_children() - started
    found = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "transcribe.py"),
            *("--run", str(run), "--batch-size", "32", str(held_out)),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    curve = [(each["step"], each["loss"]) for each in events if each["event"] == "eval"]
    print("\n".join(found.stdout.splitlines()[:8]))
    print(found.stderr.strip().splitlines()[-1])
    print("held-out loss, nats per token, by step:", json.dumps(curve))
    print(f"{spent:.0f} CPU-seconds of training in this call")
    return 0


def seconds_of_children() -> float:
    """CPU-seconds of the processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
