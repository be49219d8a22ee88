"""The estimate beside the compiled program's own figure."""

import jax
import jax.numpy as jnp
import pytest
from helpers import MEMORY_ESTIMATE

from optimus_jax.config import Config
from optimus_jax.mesh.axes import AxisSizes
from optimus_jax.mesh.build import build_mesh, discover
from optimus_jax.models.shapes import planned_shapes
from optimus_jax.planning.memory import estimate_memory
from optimus_jax.planning.search import plan_for
from optimus_jax.presets import model_preset
from optimus_jax.training.state import abstract_state
from optimus_jax.training.step import build_program


@pytest.mark.parametrize(("model", "mesh", "settings"), [
    ("gpt2-nano", "data=8", {}),
    ("gpt2-nano", "fsdp=8", {"parallel.remat": "full"}),
    ("llama-nano", "data=2,fsdp=2,tensor=2", {}),
])
def test_the_estimate_is_near_what_xla_allocates(model, mesh, settings):
    config = Config(model=model_preset(model)).with_values({"parallel.mesh": mesh, **settings})
    plan = plan_for(config, AxisSizes.parse(mesh), discover())
    shapes = planned_shapes(config.model, plan)
    program = build_program(config, shapes, plan, build_mesh(plan))
    batch, length = config.data.global_batch, config.seq_len
    rows = {name: jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=program.batch_sharding)
            for name in ("tokens", "targets", "positions", "segments")}
    rows["loss_mask"] = jax.ShapeDtypeStruct((batch, length), jnp.bool_, sharding=program.batch_sharding)
    rows["examples"] = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=program.batch_sharding)
    state = abstract_state(shapes, program.optimizer, config.precision, plan, program.mesh)
    compiled = program.train_step.lower(state, rows).compile().memory_analysis()
    allocated = (compiled.argument_size_in_bytes + compiled.temp_size_in_bytes + compiled.output_size_in_bytes
                 - compiled.alias_size_in_bytes)
    estimate = estimate_memory(config.model, plan, seq_len=length, global_batch=batch)
    assert estimate.total == pytest.approx(allocated, rel=MEMORY_ESTIMATE)
    assert estimate.states == pytest.approx(compiled.argument_size_in_bytes, rel=0.05), "states are known, not estimated"
