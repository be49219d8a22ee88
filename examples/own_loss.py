"""Learn with a loss of one's own: here vowels count twice, in every layout.

`python examples/own_loss.py` takes half a minute on virtual devices of a CPU. A task says what is
learnt (docs/howto/add_a_task.md); whoever resumes such a run gives it again.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

import optimus_jax
from optimus_jax.training.task import LossInputs, TaskSums
from optimus_jax.training.tasks import NEXT_TOKEN, TASKS

SIZES: dict[str, Any] = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 256}
WEIGHTS = np.ones(257, np.float32)  # of each byte, and of the end of a document
WEIGHTS[list(b"aeiou")] = 2.0


def weighted(inputs: LossInputs) -> TaskSums:
    """The loss of next tokens, each with the weight of its kind."""
    rows = inputs.rows
    weights = jnp.where(rows["loss_mask"], jnp.asarray(WEIGHTS)[rows["targets"]], 0.0)
    return TASKS[NEXT_TOKEN].loss(replace(inputs, rows={**rows, "loss_mask": weights}))


vowels = replace(TASKS[NEXT_TOKEN], loss=weighted)
losses = {}
for mesh in ("data=8", "pipe=2,fsdp=2,tensor=2"):
    result = optimus_jax.train(
        "gpt2-nano",
        task=vowels,
        data=[{"text": f"{number} is a number, and so is {number + 1}. "} for number in range(500)],
        mesh=mesh,
        cpu_devices=8,
        steps=5,
        eval_every=0,
        seq_len=64,
        global_batch=16,
        run_dir=f"runs/own_loss/{mesh}",
        **SIZES,
    )
    losses[mesh] = [step.loss for step in result.history]
for mesh, each in losses.items():
    print(mesh, " ".join(f"{loss:.4f}" for loss in each))
print(f"they differ by {np.ptp([*losses.values()], axis=0).max():.4f} at most")
