"""Profile a few steps, and read from the run's own files where their time went.

`python examples/where_time_goes.py` takes a few seconds on virtual devices of a CPU.
"""

import json
from typing import Any

import optimus_jax

SIZES: dict[str, Any] = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 256}

result = optimus_jax.train(
    "gpt2-nano",
    data=[{"text": f"{number} is a number, and so is {number + 1}. "} for number in range(500)],
    mesh="data=2,fsdp=2,tensor=2",
    cpu_devices=8,
    steps=8,
    eval_every=0,
    seq_len=64,
    global_batch=16,
    profile="4:7",
    run_dir="runs/where_time_goes",
    progress="none",
    **SIZES,
)

# A line for every step, and one for every event: JSON Lines, as pandas.read_json(lines=True) reads.
with open(result.run_dir / "metrics.jsonl") as lines:
    steps = [json.loads(line) for line in lines]
with open(result.run_dir / "events.jsonl") as lines:
    events = [json.loads(line) for line in lines]
fastest = min(steps, key=lambda step: step["step_time_s"])
print(f"the fastest of {len(steps)} steps took {fastest['step_time_s']:.3f} s")
(profile,) = [event for event in events if event["event"] == "profile"]
for name, time_s in sorted(profile["parts_s"].items(), key=lambda part: -part[1]):
    print(f"{name:<14}{time_s / profile['step_time_s']:6.1%}")
