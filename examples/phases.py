"""Train on longer examples halfway, and read what the run recorded into a table.

`python examples/phases.py` takes half a minute on virtual devices of a CPU, and needs pandas.
"""

from typing import Any

import pandas as pd

import optimus_jax

SIZES: dict[str, Any] = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 256}

result = optimus_jax.train(
    "gpt2-nano",
    phases="3:16x64",  # after three steps: 16 examples of 64 tokens
    mesh="data=2,fsdp=4",
    cpu_devices=8,
    steps=6,
    seq_len=32,
    global_batch=32,
    eval_every=3,
    run_dir="runs/phases",
    **SIZES,
)
steps = pd.read_json(result.run_dir / "metrics.jsonl", lines=True)
print(steps.filter(["step", "loss", "tokens", "step_time_s"]).to_string(index=False))
events = pd.read_json(result.run_dir / "events.jsonl", lines=True)
print(events.query("event == 'eval'").filter(["step", "loss"]).to_string(index=False))
