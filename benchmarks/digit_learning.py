"""What vit-nano learns of scikit-learn's handwritten digits: how many of those held out it reads.

    python benchmarks/digit_learning.py --work DIR

1,797 images of 8 x 8 pixels lie in a folder for each digit; a fifth is held out of training. A
second call goes on where the first one ended.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parent.parent / "scripts" / "train.py"


def write_digits(folder: Path) -> None:
    """Write each digit as a PNG file in the folder of its label, unless they are there."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    if folder.exists():
        return
    for number, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        image = np.minimum(pixels.reshape(8, 8) * 16, 255).astype(np.uint8)
        Image.fromarray(image).save(folder / str(label) / f"{number:04}.png")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the images and the run")
    parser.add_argument("--steps", type=int, default=4000, help="steps (default: %(default)s)")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    write_digits(work / "digits")
    command = [
        *(sys.executable, str(TRAIN), "--run-dir", str(work / "run"), "--resume", "auto"),
        *("--model", "vit-nano", "--data", str(work / "digits"), "--mesh", "data=1"),
        *("--global-batch", "64", "--lr", "2e-3", "--steps", str(options.steps)),
        *("--control", "off", "--progress", "none", "--set", "augmentation.shift=1"),
        *("--set", "data.eval_fraction=0.2", "--set", "evaluation.examples=1000"),
        *("--set", f"eval_every={options.steps // 10}"),
    ]
    subprocess.run(command, check=True)
    events = map(json.loads, (work / "run" / "events.jsonl").read_text().splitlines())
    print("| after step | held-out loss | accuracy |")
    print("|---|---|---|")
    for event in events:
        if event["event"] == "eval":
            accuracy = event["metrics"]["accuracy"]
            print(f"| {event['step']} | {event['loss']:.3f} | {accuracy:.1%} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
