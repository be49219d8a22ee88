"""Models of texts, images and sound go on under another plan as if they had stayed."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import F32_RELATIVE
from plans import random_state
from switch_cases import compiled_quickly, copied, layout_of

from optimus_jax.config import Config, Generator
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.data.batch import synthetic_batch
from optimus_jax.mesh.build import discover
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.reshard.reshard import Move
from optimus_jax.training.step import build_program

SMALL = {"num_layers": 4, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
SMALL |= {"mlp_dim": 48, "dropout": 0.1}
MODELS = {
    "bert-nano": SMALL | {"max_length": 16},
    "electra-nano": SMALL
    | {"max_length": 16, "generator": Generator(num_layers=2, embed_dim=16, mlp_dim=32)},
    "vit-nano": SMALL,
    "whisper-nano": SMALL | {"frames": 12, "max_length": 20, "mel_bins": 8},
}
DAILY = ("bert-nano", "whisper-nano")
"""Models that `make test` switches; the others are nightly."""
MESHES = ("data=2,fsdp=2,tensor=2", "pipe=2,fsdp=2,tensor=2")
BATCH, BUDGET_BYTES = 8, 2**20


def program_on(mesh, name):
    model = replace(model_preset(name), **MODELS[name])
    config = Config(model=model).with_values(
        {"parallel.mesh": mesh, "data.global_batch": BATCH, "parallel.microbatches": 2}
    )
    axes = AxisSizes.parse(mesh)
    plan = plan_for(config, axes, replace(discover(), num_devices=axes.num_devices))
    return build_program(config, plan, jax.devices())


def batch_for(program, step):
    model = program.config.model
    return program.put_batch(
        synthetic_batch(
            vocab_size=model.vocab_size,
            rows=BATCH,
            seq_len=program.config.seq_len,
            seed=step,
            patch_values=model.patch_values,
            frames=model.frames,
        )
    )


def losses_of(program, state, steps):
    """The state after some steps, and their losses."""
    batches = [batch_for(program, step) for step in steps]
    step = program.train_step.lower(state, batches[0]).compile()
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly, id=name)
        for name in MODELS
    ],
)
def test_a_run_that_switches_equals_one_that_stays(name):
    with compiled_quickly():
        first, second = (program_on(mesh, name) for mesh in MESHES)
        state = random_state(first)
        _, stayed = losses_of(first, copied(state), (1, 2, 3, 4))
        state, before = losses_of(first, state, (1, 2))
        state = Move(layout_of(first), layout_of(second), budget_bytes=BUDGET_BYTES).run(state)
        _, after = losses_of(second, state, (3, 4))
    assert before == stayed[:2]
    np.testing.assert_allclose(after, stayed[2:], rtol=F32_RELATIVE)
    assert len({*stayed}) == 4
