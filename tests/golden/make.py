"""Ten losses of a GPT and of a Llama on one device, kept so that no change of the arithmetic goes
unseen.

    python tests/golden/make.py        writes tests/golden/*.json; only in a commit that says why
    they changed

Tokens come from a fixed generator, not from text, which differs between machines.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from optimus_jax.config import Config, DataConfig, OptimizerConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.mesh.build import discover
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.training.step import build_program

MODELS = ("gpt2-nano", "llama-nano")
STEPS, BATCH, LENGTH = 10, 4, 64
EPSILON = 1e-5
"""A root of the second moment far below it no longer decides the sign of an update. With 1e-8 a
last bit of a parameter moved these losses by up to 5e-6, with this by 3e-7 (24 draws), so that
processors agree and a change of the arithmetic is seen."""


def golden_file(model: str) -> Path:
    """Where a model's losses are kept."""
    return Path(__file__).with_name(f"{model}.json")


def golden_losses(model: str) -> list[tuple[int, float]]:
    """(step, loss) of ten steps from seed 0; a loss has every digit of its float32."""
    config = Config(
        model=dataclasses.replace(model_preset(model), num_layers=2),
        steps=STEPS,
        optimizer=OptimizerConfig(epsilon=EPSILON),
        data=DataConfig(seq_len=LENGTH, global_batch=BATCH),
    )
    plan = plan_for(config, AxisSizes(), discover())
    program = build_program(config, plan, jax.devices()[:1])
    state, losses = program.init(jnp.int32(config.seed)), []
    for step in range(1, STEPS + 1):
        state, metrics = program.train_step(
            state, put_batch(_batch(step, config.model.vocab_size), program.batch_sharding, BATCH)
        )
        losses.append((step, float(metrics["loss"])))
    return losses


def _batch(step: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Tokens that can be learned: each follows from the one before it nine times in ten."""
    random = np.random.Generator(np.random.PCG64(step))
    tokens = random.integers(0, vocab_size, (BATCH, LENGTH + 1), dtype=np.int32)
    for position in range(1, LENGTH + 1):
        follows = random.random(BATCH) < 0.9
        tokens[:, position] = np.where(
            follows, (tokens[:, position - 1] * 5 + 3) % vocab_size, tokens[:, position]
        )
    border = LENGTH // 3
    positions = np.arange(LENGTH, dtype=np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(
            np.where(positions < border, positions, positions - border), (BATCH, 1)
        ),
        "segments": np.tile((positions >= border).astype(np.int32), (BATCH, 1)),
        "loss_mask": np.tile(positions != border - 1, (BATCH, 1)),
        "examples": np.arange(BATCH, dtype=np.int32),
    }


def main() -> None:
    for model in MODELS:
        value = {
            "made_with": f"jax {jax.__version__}, {discover().device_kind}",
            "losses": golden_losses(model),
        }
        golden_file(model).write_text(json.dumps(value, indent=1) + "\n")
        print(f"{golden_file(model)}: {value['losses'][0][1]} ... {value['losses'][-1][1]}")


if __name__ == "__main__":
    sys.exit(main())
