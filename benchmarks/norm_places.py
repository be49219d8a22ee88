"""Whether a deep encoder learns with norms after each sublayer, as BERT has them, or before it.

    python benchmarks/norm_places.py --work DIR

Shoeybi et al. 2019 (arXiv:1909.08053, section 5.3) found that BERT gets better with size only if
norms come first. Here encoders of two depths restore masked bytes of Python's own library, with
norms in both places and nothing else changed. The held-out loss after every fifth of the steps is
printed. A second call goes on where the first one ended.
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parent.parent / "scripts" / "train.py"
DEPTHS = (4, 24)
PLACES = {
    "after": {},
    "before": {
        "model.features.norm_place": "pre",
        "model.features.final_norm": "true",
        "model.features.embedding_norm": "false",
    },
}
SIZES = {
    "model.embed_dim": 128,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 32,
    "model.mlp_dim": 512,
    "optimizer.warmup_steps": 40,
    "evaluation.examples": 256,
}


def learn(run: Path, num_layers: int, place: str, steps: int, lr: float) -> list[float]:
    """Held-out losses of a run, which is trained unless it is complete."""
    settings = {**SIZES, **PLACES[place], "model.num_layers": num_layers}
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [
        *(sys.executable, str(TRAIN), "--run-dir", str(run), "--resume", "auto"),
        *("--model", "bert-nano", "--seq-len", "64", "--global-batch", "32"),
        *("--steps", str(steps), "--lr", str(lr), "--mesh", "data=1", "--remat", "none"),
        *("--control", "off", "--progress", "none", "--set", f"eval_every={steps // 5}"),
    ]
    subprocess.run([*command, *flags], check=True)
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "eval"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=500, help="of each run (default: 500)")
    parser.add_argument("--lr", type=float, default=1e-3, help="largest rate (default: 0.001)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    print("| layers | norms | held-out loss, nats per masked byte, after each fifth of the steps |")
    print("|---|---|---|")
    for num_layers, place in itertools.product(DEPTHS, PLACES):
        run = options.work.resolve() / f"{num_layers}-{place}"
        losses = learn(run, num_layers, place, options.steps, options.lr)
        print(f"| {num_layers} | {place} | {', '.join(f'{loss:.3f}' for loss in losses)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
