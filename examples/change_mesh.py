"""Stop a run, and go on with other stages, shards and replicas: the loss continues.

`python examples/change_mesh.py` takes half a minute on virtual devices of a CPU.
"""

from typing import Any

import optimus_jax

SETTINGS: dict[str, Any] = {
    "model.num_layers": 2,
    "model.embed_dim": 64,
    "model.mlp_dim": 256,
    "optimizer.decay_steps": 10,  # the learning rate of both parts is that of ten steps
}
first = optimus_jax.train(
    "gpt2-nano",
    mesh="pipe=2,data=4",
    cpu_devices=8,
    steps=5,
    seq_len=64,
    global_batch=16,
    run_dir="runs/change_mesh",
    **SETTINGS,
)
second = optimus_jax.train(run_dir=first.run_dir, resume=True, mesh="fsdp=8", steps=10)
for plan, steps in ((first.plan, second.history[:5]), (second.plan, second.history[5:])):
    print(plan.axes, " ".join(f"{step.loss:.3f}" for step in steps))
