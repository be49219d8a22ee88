"""The public names of the package."""

import subprocess
import sys
from pathlib import Path

import optimus_jax

REFERENCE = Path(__file__).parents[1] / "docs" / "site" / "generate.py"


def test_dir_lists_the_public_names_and_each_exists():
    assert dir(optimus_jax) == sorted(optimus_jax.__all__)
    assert {"train", "find_plans", "show_mesh"} <= set(dir(optimus_jax))
    assert all(getattr(optimus_jax, name) is not None for name in optimus_jax.__all__)


def test_every_public_name_is_in_the_reference():
    page = REFERENCE.read_text(encoding="utf-8")
    assert [
        name
        for name in optimus_jax.__all__
        if name != "__version__" and f":: optimus_jax.{name}\n" not in page
    ] == []


def test_importing_the_package_does_not_import_jax():
    command = "import sys, optimus_jax; dir(optimus_jax); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command]).returncode == 0
