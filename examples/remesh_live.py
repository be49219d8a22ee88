"""Change the mesh of a run while it trains: the state moves from device to device, and the loss
goes on. (`--control auto` does the same by itself, when it pays.)

`python examples/remesh_live.py` takes half a minute on virtual devices of a CPU.
"""

from collections.abc import Mapping
from typing import Any

import optimus_jax

SIZES: dict[str, Any] = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 256}


class Moves(optimus_jax.Callback):
    """Says when the state has moved."""

    def on_switch(self, event: Mapping[str, Any]) -> None:
        print(f"{event['bytes_moved'] / 1e6:.1f} MB moved in {event['step_delay_s']:.2f} s")


with optimus_jax.training_loop(
    "gpt2-nano",
    mesh="pipe=2,data=4",
    cpu_devices=8,
    steps=9,
    seq_len=64,
    global_batch=16,
    run_dir="runs/remesh_live",
    progress="none",
    callbacks=[Moves()],
    **SIZES,
) as loop:
    for batch in loop:
        metrics = loop.step(batch)
        print(f"step {loop.steps_done} on {loop.plan.axes}: loss {float(metrics['loss']):.3f}")
        if loop.steps_done == 3:
            loop.remesh("fsdp=4,tensor=2", zero=1)
        if loop.steps_done == 6:
            loop.remesh("pipe=2,data=4")  # compiled already: the run goes on at once
