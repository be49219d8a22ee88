"""The wheel, installed into an empty environment, works without the source tree."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import jax
import pytest

from optimus_jax.version import VERSION

ROOT = Path(__file__).parents[1]


def run(*arguments, cwd, **environment):
    ended = subprocess.run(
        list(map(str, arguments)),
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built in a copy of the files that git knows: a build leaves files behind."""
    pytest.importorskip("setuptools", minversion="77")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(built)!r}))"
    run(sys.executable, "-c", build, cwd=source)
    (file,) = built.glob("*.whl")
    return file


def test_the_wheel_has_every_file_of_the_package(wheel):
    listed = run("git", "ls-files", "--", "optimus_jax", cwd=ROOT).split()
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in listed if (ROOT / name).exists()} <= set(names)
    assert {name.split("/")[0] for name in names} == {
        "optimus_jax",
        f"optimus_jax-{VERSION}.dist-info",
    }


@pytest.fixture(scope="module")
def home(wheel, tmp_path_factory):
    """An environment with the wheel; its dependencies are read from this environment's
    site-packages.
    """
    pytest.importorskip("pip")
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel)
    run(sys.executable, "-m", "pip", "--python", home / "bin/python", *install, cwd=home)
    (packages,) = home.glob("lib/python*/site-packages")
    # Links of editable installs in that directory are not followed.
    (packages / "dependencies.pth").write_text(f"{Path(jax.__file__).parents[1]}\n")
    return home


def test_the_installed_package_is_imported(home, tmp_path):
    where = run(
        home / "bin/python", "-c", "import optimus_jax; print(optimus_jax.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(home)
    assert run(home / "bin/optimus", "--version", cwd=tmp_path) == f"optimus_jax {VERSION}\n"


def test_commands_work_from_any_folder(home, tmp_path):
    optimus = home / "bin/optimus"
    assert run(optimus, "plan", "--help", cwd=tmp_path).startswith("usage: optimus plan ")
    # These need data files: the hardware database and the scenarios.
    ranked = run(optimus, "plan", "--model", "gpt2", "--cluster", "h100:1x2", cwd=tmp_path)
    assert "data=2" in ranked
    assert "train with: optimus train --model gpt2" in ranked
    assert "link-quarter" in run(optimus, "simulate", "--list", cwd=tmp_path)


def test_an_installed_command_trains(home, tmp_path):
    flags = (
        "--model gpt2-nano --cpu-devices 2 --mesh data=2 --steps 2 --seq-len 32 --global-batch 4"
    )
    shown = run(home / "bin/optimus", "train", *flags.split(), "--run-dir", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").exists(), shown
