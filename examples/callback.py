"""Watch a run in Python, and end it once it is good enough.

`python examples/callback.py` takes half a minute on virtual devices of a CPU.
"""

from typing import Any

import optimus_jax

SIZES: dict[str, Any] = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 256}


class GoodEnough(optimus_jax.Callback):
    """Ends the run after the first evaluation below a loss."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def on_start(self, run: optimus_jax.RunInfo) -> None:
        self.run = run
        print(f"step {run.first_step} is next, on {run.plan.axes}")

    def on_evaluate(self, record: optimus_jax.EvalRecord) -> None:
        print(f"step {record.step}: held-out loss {record.loss:.3f}")
        if record.loss < self.loss:
            self.run.stop()

    def on_end(self, step: int, reason: str) -> None:
        print(f"ended after step {step}: {reason}")


optimus_jax.train(
    "gpt2-nano",
    data=[{"text": f"{number} is a number, and so is {number + 1}. "} for number in range(2000)],
    callbacks=[GoodEnough(3.0)],
    mesh="data=8",
    cpu_devices=8,
    steps=200,
    eval_every=5,
    seq_len=64,
    global_batch=16,
    run_dir="runs/callback",
    **SIZES,
)
