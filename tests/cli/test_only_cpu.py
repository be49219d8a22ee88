"""Commands that only calculate take no accelerator."""

import os
import subprocess
import sys

import pytest

PROBE = """
import sys
from optimus_jax.{module} import main
try:
    main()
except SystemExit:
    pass
from jax._src import xla_bridge
print("platforms:", *sorted(xla_bridge.backends()), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("cli.plan", "--model gpt2-nano --cluster h100:1x2 --global-batch 8"),
        ("cli.simulate", "--list"),
        ("cli.schedule", "--schedule interleaved --stages 2 --microbatches 4"),
    ],
)
def test_a_command_that_only_calculates_leaves_the_accelerators_alone(module, flags):
    """JAX would take 75% of a GPU's memory beside the job that runs there."""
    environment = {**os.environ, "JAX_PLATFORMS": "accelerator_of_a_running_job"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module), *flags.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "platforms: cpu" in done.stderr, done.stderr
