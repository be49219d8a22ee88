"""Train a small model, then adapters beside it on other texts (LoRA), on another mesh.

`python examples/adapters.py` takes half a minute on virtual devices of a CPU.
"""

from typing import Any

import optimus_jax

COMMON: dict[str, Any] = {
    "cpu_devices": 8,
    "seq_len": 64,
    "global_batch": 16,
    "eval_every": 0,
    "progress": "none",
}
SIZES: dict[str, Any] = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 256}
LORA: dict[str, Any] = {"model.tuning.method": "lora", "model.tuning.rank": 8}

numbers = [{"text": f"{number} is a number, and so is {number + 1}. "} for number in range(500)]
base = optimus_jax.train(
    "gpt2-nano", data=numbers, mesh="data=8", steps=20, run_dir="runs/base", **SIZES, **COMMON
)
colours = [{"text": f"The colour of number {number} is blue. "} for number in range(500)]
tuned = optimus_jax.train(
    "gpt2-nano",
    data=colours,
    init_from=str(base.run_dir),
    mesh="fsdp=4,tensor=2",
    steps=20,
    lr=1e-2,
    run_dir="runs/tuned",
    **SIZES,
    **LORA,
    **COMMON,
)
for name, run in (("base", base), ("tuned", tuned)):
    losses = [step.loss for step in run.history]
    print(f"{name}: loss {losses[0]:.3f}, then {losses[-1]:.3f}, on {run.plan.axes}")
print(optimus_jax.load(tuned.run_dir).generate("The colour of", max_new_tokens=20))
