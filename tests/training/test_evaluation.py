"""An evaluation has the same loss over the same tokens, whatever the batch, mesh or phase."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config import Config
from optimus_jax.config.phases import in_phase, phases_of
from optimus_jax.control.executables import executable_of
from optimus_jax.data.dataset import Data
from optimus_jax.data.loader import check_held_out
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.data.tokens import TokenStream
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.run.inputs import Inputs
from optimus_jax.training.evaluation import eval_rows
from optimus_jax.training.step import build_program

EXAMPLES, LENGTH, EOS = 11, 16, 5
BASE_SETTINGS = {
    "data.seq_len": LENGTH,
    "evaluation.examples": EXAMPLES,
    "model.max_length": 64,
    "model.num_layers": 2,
}


def held_out(config):
    random = np.random.default_rng(3)
    tokens = random.integers(0, config.model.vocab_size, 20 * LENGTH + 1).astype(np.uint16)
    return TokenStream(name="held out", tokens=tokens, eos=EOS, vocab_size=config.model.vocab_size)


def evaluated(case, settings, *, phase=0):
    """Sums of losses and of counted tokens, as in the trainer, and the shape of batches."""
    config = plans.make_config(plans.model_for(case, "gpt"), case, BASE_SETTINGS | settings)
    stream = held_out(config)
    data = Data(
        train=stream, held_out=stream, tokenizer=ByteTokenizer(), description="", identity={}
    )
    found = check_held_out(
        stream,
        seq_len=config.eval_seq_len,
        respect_documents=True,
        num_examples=config.eval_examples,
    )
    inputs = Inputs(config=config, data=data, num_eval_examples=found)
    now = phases_of(config)[phase]
    own = in_phase(config, now)
    plan = plans.make_plan(own)
    program = build_program(own, plan, jax.devices()[: plan.num_devices])
    phase_batches = inputs.phase_batches(program, now.steps_before)
    assert phase_batches.held_out is not None
    num_rows = eval_rows(own, plan)
    params = plans.random_state(program).params
    batches = list(phase_batches.held_out.batches())
    sums = [
        program.eval_step(params, put_batch(batch, program.batch_sharding, num_rows))
        for batch in batches
    ]
    losses, tokens = zip(*((float(one.loss), int(one.tokens)) for one in sums), strict=True)
    return sum(losses), sum(tokens), (num_rows, batches[0]["tokens"].shape[1])


def test_eval_loss_does_not_depend_on_batch_mesh_or_phase():
    one, phases = plans.case("data=1"), {"data.phases": "3:8,5:16x32,9:4x8"}
    loss, tokens, shape = evaluated(one, {"data.global_batch": 8})
    assert shape == (8, LENGTH)
    assert 0 < tokens < EXAMPLES * LENGTH
    for case, settings, phase, expected in (
        (plans.case("data=4,fsdp=2"), {"data.global_batch": 64}, 0, (16, LENGTH)),
        (plans.case("pipe=2,data=2", microbatches=2), {"data.global_batch": 16}, 0, (12, LENGTH)),
        (one, {"data.global_batch": 4, **phases}, 3, (2, LENGTH)),
    ):
        found = evaluated(case, settings, phase=phase)
        assert found == (pytest.approx(loss, rel=F32_RELATIVE), tokens, expected), (case, settings)


@given(
    batch=st.integers(1, 40),
    length=st.sampled_from([16, 64]),
    data=st.integers(1, 8),
    examples=st.integers(1, 300),
    eval_length=st.sampled_from([None, 8, 64]),
)
def test_eval_rows_divide_over_devices_and_are_no_more_than_needed(
    batch, length, data, examples, eval_length
):
    config = Config().with_values(
        {
            "data.global_batch": batch * data,
            "data.seq_len": length,
            "evaluation.examples": examples,
            "evaluation.seq_len": eval_length,
            "parallel.mesh": f"data={data}",
        }
    )
    plan = plans.make_plan(config)
    rows = eval_rows(config, plan)
    assert rows % data == 0
    assert rows < examples + data
    assert rows == data or rows * config.eval_seq_len <= batch * data * length


def test_eval_step_is_compiled_for_every_shape_it_is_called_with():
    """In a phase of shorter sequences probes and evaluations have different shapes, and an
    executable takes only one.
    """
    config = plans.make_config(
        plans.MODELS["gpt"],
        plans.case("data=2"),
        BASE_SETTINGS | {"data.phases": "3:8x8", "data.global_batch": 4},
    )
    own = in_phase(config, phases_of(config)[1])
    plan = plans.make_plan(own)
    program = build_program(own, plan, jax.devices()[:2])
    lowered = []

    class Function:
        def lower(self, params, batch):
            lowered.append(batch["tokens"].shape)
            return self

        def compile(self):
            return self

    compiled = SimpleNamespace(
        program=replace(program, eval_step=Function()), train_step=None, step_bytes=0, compile_s=0.0
    )
    executable = executable_of(compiled)
    assert not executable.can_be_verified
    executable.compile_probe()
    assert lowered == [(8, 8)], "the plan that a run leaves needs no more"
    assert executable.can_be_verified
    executable.compile_evaluation()
    assert lowered == [(8, 8), (4, LENGTH)]
