"""How a command of this program is typed: `optimus train`, or `python scripts/train.py` from a
checkout.
"""

import shlex
import sys
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
"""The scripts of a checkout; an installed package has none."""


def typed_command(name: str) -> str:
    """How to type the command `name`, in the way in which this program was started."""
    started = Path(sys.argv[0])
    return (
        f"python {shlex.quote(str(started.with_name(f'{name}.py')))}"
        if started.suffix == ".py" and started.resolve().parent == _SCRIPTS
        else f"optimus {name}"
    )
