"""Layers of one's own, here without attention: they train, are planned and move like others."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import plans
import pytest
from flax import nnx
from helpers import F32_RELATIVE, assert_close
from test_equal_to_one_device import run_case

import optimus_jax
from optimus_jax.config import ModelConfig, Tuning
from optimus_jax.errors import ConfigError
from optimus_jax.mesh.axes import EMBED, MLP, PAIR
from optimus_jax.models.block import LayersOutput
from optimus_jax.models.families import BLOCKS, FAMILIES, check_family
from optimus_jax.models.flops import layer_flops
from optimus_jax.models.layers import Norm, constant, normal, scaled
from optimus_jax.models.products import project, project_back
from optimus_jax.models.shapes import model_shapes
from optimus_jax.models.tuning_checks import check_freeze
from optimus_jax.planning.api import find_plans
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.training.state import bytes_on_device

TAPS = 3
MODEL = replace(plans.LLAMA, name="convolutions", family="convolutions", dropout=0.0)
NANO = ModelConfig(
    name="convolutions-nano",
    family="convolutions",
    vocab_size=257,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    mlp_dim=64,
    max_length=64,
    tied=True,
)


class ConvolutionBlock(nnx.Module):
    """A gated convolution over a few tokens of the same document."""

    def __init__(self, config, *, rngs):
        embed, inner, std = config.embed_dim, config.mlp_dim, config.init_std
        self.norm = Norm("rms", (embed,), config.norm_epsilon)
        self.up = normal(rngs, (embed, 2, inner), (EMBED, PAIR, MLP), std, "matrix", "mlp")
        self.taps = constant(0.5, (TAPS, inner), ("taps", MLP), "scale", "mlp")
        self.down = normal(rngs, (embed, inner), (EMBED, MLP), std, "matrix_back", "mlp")

    def __call__(self, x_BLD, layer, run, cos_sin, cache=None, read=None):
        comm, segments = run.comm, run.visibility.segments_BL

        def projected(x_BLD):
            seen = comm.fan_out(self.norm(x_BLD, comm.sums), MLP)
            return project(seen, comm.weight(self.up), comm.dtype)

        def partial_out(both):
            values, gates = both[:, :, 0], both[:, :, 1]
            mixed = jnp.zeros_like(values)
            for back in range(TAPS):
                earlier = jnp.roll(values, back, axis=1).at[:, :back].set(0)
                if segments is not None:
                    is_same = jnp.roll(segments, back, axis=1) == segments
                    earlier = jnp.where(is_same[..., None], earlier, 0)
                mixed = mixed + scaled(earlier, self.taps[...][back])
            mixed = mixed * jax.nn.sigmoid(gates)
            return project_back(mixed, comm.weight(self.down), comm.dtype, result=comm.sums)

        part = run.recomputed(partial_out)(run.recomputed(projected)(x_BLD))
        return LayersOutput(x_BLD + comm.sum_stream(part, MLP).astype(x_BLD.dtype), {}, None)


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setitem(FAMILIES, "convolutions", FAMILIES["llama"])
    monkeypatch.setitem(BLOCKS, "convolutions", ConvolutionBlock)


@pytest.mark.parametrize(
    "case",
    [
        plans.case("data=2,fsdp=2,tensor=2", zero=3, microbatches=2, remat="full"),
        plans.case("pipe=2,data=2,tensor=2", microbatches=4, sequence_parallel=True),
        plans.case("fsdp=4,tensor=2", overlap="layers"),
    ],
    ids=str,
)
def test_it_equals_one_device(case):
    model = replace(MODEL, num_layers=plans.model_for(case, "llama").num_layers)
    run, one = (run_case(model, each) for each in (case, plans.ONE_DEVICE))
    for ours, theirs in zip(run.states, one.states, strict=True):
        assert any("/taps" in path for path in theirs)
        assert not any("/attention" in path for path in theirs)
        for path in theirs:
            assert_close(ours[path], theirs[path], F32_RELATIVE)
    state, scalars = run.built.program.abstract_state(), 64
    memory = memory_of_run(run.built.config, run.built.plan)
    assert memory.states == pytest.approx(bytes_on_device(state), abs=scalars)


def test_its_costs_are_read_from_its_program():
    matrices, core = layer_flops(MODEL, 128)
    assert core == 0
    assert matrices == 2 * 128 * MODEL.embed_dim * 3 * MODEL.mlp_dim
    num_params = model_shapes(MODEL, MODEL.vocab_size).num_params
    wider = replace(MODEL, embed_dim=2048, mlp_dim=8192, num_layers=16, max_length=4096)
    best = find_plans(wider, "h100:8", seq_len=4096, global_batch=32)[0]
    assert best.prediction.step_time_s > 0
    assert best.memory.total > 12 * num_params


def test_a_run_of_it_goes_on_on_another_mesh(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 100)
    options = {
        "seq_len": 32,
        "global_batch": 8,
        "eval_every": 0,
        "progress": "none",
        "control": "off",
    }

    def train(run, model=None, **more):
        return optimus_jax.train(model, data=str(text), run_dir=tmp_path / run, **options | more)

    whole = train("whole", NANO, steps=4, mesh="pipe=2,data=4")
    train("moved", NANO, steps=2, mesh="pipe=2,data=4", **{"optimizer.decay_steps": 4})
    moved = train("moved", resume=True, steps=4, mesh="fsdp=4,tensor=2")
    assert [each.loss for each in moved.history] == pytest.approx(
        [each.loss for each in whole.history], rel=F32_RELATIVE
    )
    model = optimus_jax.load(tmp_path / "moved")
    assert model.logits("to be").shape[-1] == NANO.vocab_size
    with pytest.raises(ConfigError, match=r"ConvolutionBlock keeps no keys(.|\n)*with_earlier"):
        model.generate("to be", max_new_tokens=2)


class OfFlax(ConvolutionBlock):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.linear = nnx.Linear(config.embed_dim, config.embed_dim, rngs=rngs)


class Widens(ConvolutionBlock):
    def __call__(self, x_BLD, *others):
        out = super().__call__(x_BLD, *others)
        return out._replace(x_BLD=jnp.concatenate([out.x_BLD, out.x_BLD], -1))


class GivesAnArray(ConvolutionBlock):
    def __call__(self, x_BLD, *others):
        return super().__call__(x_BLD, *others).x_BLD


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (OfFlax, r"does not say what it is(.|\n)*Param of shape(.|\n)*make it with normal"),
        (Widens, r"Widens does not return(.|\n)*\], for (.|\n)*\](.|\n)*return LayersOutput"),
        (GivesAnArray, r"GivesAnArray does not return(.|\n)*an array, for (.|\n)*LayersOutput"),
    ],
)
def test_mistakes_are_named(block, told, monkeypatch):
    family = block.__name__.lower()
    monkeypatch.setitem(FAMILIES, family, FAMILIES["llama"])
    monkeypatch.setitem(BLOCKS, family, block)
    with pytest.raises(ConfigError, match=told):
        find_plans(replace(NANO, family=family), "h100:8", seq_len=32, global_batch=8)


def test_adapters_need_modules_that_have_them():
    tuned = replace(NANO, tuning=Tuning(method="lora"))
    with pytest.raises(ConfigError, match=r"nothing of convolutions-nano(.|\n)*layers of your own"):
        check_freeze(tuned)


def test_a_row_cannot_change_once_it_was_used(monkeypatch):
    check_family(NANO)
    monkeypatch.setitem(BLOCKS, "convolutions", OfFlax)
    with pytest.raises(ConfigError, match=r"has changed(.|\n)*FAMILIES or BLOCKS"):
        check_family(NANO)
    monkeypatch.setitem(FAMILIES, "sounds", FAMILIES["whisper"])
    monkeypatch.setitem(BLOCKS, "sounds", ConvolutionBlock)
    encoder = replace(NANO, family="sounds", encoder_layers=1, frames=16)
    with pytest.raises(ConfigError, match="layers of a model with an encoder attend to it"):
        check_family(encoder)
