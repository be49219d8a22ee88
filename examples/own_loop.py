"""Write the training loop yourself: here one that stops when a loss is reached.

`python examples/own_loop.py` takes a few seconds on virtual devices of a CPU.
"""

from typing import Any

import optimus_jax

SIZES: dict[str, Any] = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 256}

records = [{"text": f"{number} is a number, and so is {number + 1}. "} for number in range(2000)]
with optimus_jax.training_loop(
    "gpt2-nano",
    data=records,
    mesh="pipe=2,fsdp=2,tensor=2",
    cpu_devices=8,
    steps=200,
    seq_len=64,
    global_batch=16,
    lr=3e-3,
    run_dir="runs/own_loop",
    progress="none",
    **SIZES,
) as loop:
    for batch in loop:
        metrics = loop.step(batch)
        if loop.steps_done % 10 == 0 and (held_out := loop.evaluate()) is not None:
            print(f"step {loop.steps_done}: held-out loss {held_out.loss:.3f}")
            if held_out.loss < 3.0:
                break

# What it has left is a run like any other, which goes on on another mesh.
result = optimus_jax.train(
    run_dir=loop.run_dir, resume=True, data=records, mesh="data=8", steps=loop.steps_done + 5
)
print(f"after {result.history[-1].step} steps: loss {result.final_loss:.3f} on {result.plan.axes}")
