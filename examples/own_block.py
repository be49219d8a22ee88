"""Train layers of one's own, split and in stages as those of the library are.

`python examples/own_block.py` takes half a minute on virtual devices of a CPU. What a layer has to
say about itself is in docs/howto/own_block.md; whoever resumes such a run adds the rows first.
"""

from typing import Any

import numpy as np
from flax import nnx
from jax import Array

import optimus_jax
from optimus_jax.mesh.axes import HEADS, MLP, NORM
from optimus_jax.models.attention import Attention
from optimus_jax.models.block import ForwardContext, LayersOutput, with_earlier
from optimus_jax.models.families import BLOCKS, FAMILIES
from optimus_jax.models.kernels import attend
from optimus_jax.models.layers import Norm, constant, scaled
from optimus_jax.models.mlp import FeedForward


class ScaledBlock(nnx.Module):
    """Attention and feed-forward, each scaled by a learnt vector (LayerScale, arXiv:2103.17239)."""

    def __init__(self, config: optimus_jax.ModelConfig, *, rngs: nnx.Rngs):
        width = (config.embed_dim,)
        self.attention_norm = Norm("rms", width, config.norm_epsilon)
        self.attention = Attention(config, rngs=rngs)
        self.attention_gain = constant(0.1, width, (NORM,), "scale", "norm")
        self.mlp_norm = Norm("rms", width, config.norm_epsilon)
        self.mlp = FeedForward(config, rngs=rngs)
        self.mlp_gain = constant(0.1, width, (NORM,), "scale", "norm")

    def __call__(
        self,
        x_BLD: Array,
        layer: Array,
        run: ForwardContext,
        cos_sin: tuple[Array, Array] | None,
        cache: tuple[Array, Array] | None = None,
        read: Any = None,
    ) -> LayersOutput:
        comm, attention, mlp = run.comm, self.attention, self.mlp

        def projected(x_BLD: Array) -> tuple[Array, Array, Array]:
            # Devices that share the heads get the same stream; what they make of it is summed.
            seen = comm.fan_out(self.attention_norm(x_BLD, comm.sums), HEADS)
            q, k, v = attention.project(seen, comm)
            return *attention.rotated(q, k, cos_sin), v

        def hidden(x_BLD: Array) -> Array:
            return mlp.hidden(comm.fan_out(self.mlp_norm(x_BLD, comm.sums), MLP), comm)

        q, k, v = run.recomputed(projected)(x_BLD)
        if cache is not None:
            k, v = cache = with_earlier(cache, k, v, run)
        heads = attend(q, k, v, run.visibility, kernel=run.kernel)
        part = run.recomputed(lambda heads: attention.partial_out(heads, comm))(heads)
        x_BLD = x_BLD + scaled(attention.combine(part, comm), self.attention_gain[...])
        part = run.recomputed(lambda h: mlp.partial_out(h, comm))(run.recomputed(hidden)(x_BLD))
        x_BLD = x_BLD + scaled(mlp.combine(part, comm), self.mlp_gain[...])
        return LayersOutput(x_BLD, {}, cache)


FAMILIES["scaled"], BLOCKS["scaled"] = FAMILIES["llama"], ScaledBlock
model = optimus_jax.ModelConfig(
    name="scaled-nano",
    family="scaled",
    vocab_size=257,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=128,
    max_length=256,
    tied=True,
)
losses = {}
for mesh in ("data=8", "pipe=2,fsdp=2,tensor=2"):
    result = optimus_jax.train(
        model,
        data=[{"text": f"{number} is a number, and so is {number + 1}. "} for number in range(500)],
        mesh=mesh,
        cpu_devices=8,
        steps=5,
        eval_every=0,
        seq_len=64,
        global_batch=16,
        run_dir=f"runs/own_block/{mesh}",
    )
    losses[mesh] = [step.loss for step in result.history]
for mesh, each in losses.items():
    print(mesh, " ".join(f"{loss:.4f}" for loss in each))
print(f"they differ by {np.ptp([*losses.values()], axis=0).max():.4f} at most")
best = optimus_jax.find_plans(model, "h100:8", seq_len=256, global_batch=64)[0]
print(f"on 8 H100s: {best.plan.describe()}")
print("7 is" + optimus_jax.load(result.run_dir).generate("7 is", max_new_tokens=8))
