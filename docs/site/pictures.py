"""Makes the pictures of docs/images again: `python docs/site/pictures.py`, some minutes.

Trains a small model on eight virtual devices, writes its report and a page about plans, and takes
pictures of them with Chromium. Times in them are those of this machine: nothing else should run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CALM = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
"""Flags that keep Chromium from the network."""
SIZES = ("embed_dim=128", "num_heads=4", "num_kv_heads=4", "head_dim=32", "mlp_dim=512")
MARGIN = 12
"""Pixels below what is seen."""


def script(name: str, *arguments: str | Path) -> None:
    """Run a script of the project."""
    command = [sys.executable, ROOT / "scripts" / f"{name}.py", *arguments]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def picture(page: Path, image: str, *, width: int, height: int, only: str = "") -> None:
    """Take a picture of a page, or of one of its sections, and cut off what is empty below.

    Args:
      page: the page's file.
      image: name of the picture.
      width: of the window, in pixels.
      height: most of the picture, in pixels.
      only: id of the section; empty: the whole page.
    """
    shown = page.with_name(f"shown-{image}.html")
    hidden = f"<style>main > :not(#{only}) {{ display: none }}</style>" if only else ""
    shown.write_text(page.read_text(encoding="utf-8") + hidden, encoding="utf-8")
    browser = next(filter(None, map(shutil.which, NAMES)))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *CALM]
    flags += [f"--user-data-dir={page.parent / 'browser'}", f"--window-size={width},{height}"]
    flags += ["--virtual-time-budget=5000", f"--screenshot={IMAGES / image}"]
    subprocess.run([browser, *flags, shown.as_uri()], check=True, capture_output=True)
    with Image.open(IMAGES / image) as whole:
        rows = np.flatnonzero((np.asarray(whole.convert("L")) < 250).any(axis=1))
        seen = whole.crop((0, 0, width, min(height, int(rows[-1]) + MARGIN)))
    seen.convert("P", palette=Image.Palette.ADAPTIVE).save(IMAGES / image, optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, plans = Path(folder, "gpt2-nano"), Path(folder, "plans.html")
        sizes = [part for size in SIZES for part in ("--set", f"model.{size}")]
        first = ["--model", "gpt2-nano", "--mesh", "data=2,fsdp=4", "--steps", "80", *sizes]
        first += ["--seq-len", "128", "--global-batch", "16", "--cpu-devices", "8"]
        first += ["--eval-every", "20", "--profile", "20:25", "--control", "off"]
        script("train", *first, "--run-dir", run, "--set", "optimizer.decay_steps=160")
        second = ["--resume", "--mesh", "pipe=2,data=4", "--steps", "160", "--cpu-devices", "8"]
        script("train", *second, "--run-dir", run)
        script("report", run)
        picture(run / "report.html", "report.png", width=1000, height=1890)
        picture(run / "report.html", "profile.png", width=640, height=1200, only="profiles")
        clusters = ["--compare", "h100:8x8", "b200:8x8", "gb200:1x64"]
        batch = ["--global-batch", "512", "--seq-len", "4096"]
        script("plan", "--model", "llama3-8b", *clusters, *batch, "--html", plans)
        picture(plans, "plans.png", width=1000, height=950)


if __name__ == "__main__":
    main()
