"""Train on records and with an optimizer that a program makes, and use the model.

`python examples/own_data.py` takes half a minute on virtual devices of a CPU.
"""

from typing import Any

import optax

import optimus_jax

SIZES: dict[str, Any] = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 256}
records = [{"text": f"{a} plus {b} is {a + b}."} for a in range(40) for b in range(40)]
result = optimus_jax.train(
    "gpt2-nano",
    data=records,  # or a datasets.Dataset, or lists of token ids
    optimizer=optax.lion(1e-3, weight_decay=0.1),
    mesh="data=2,fsdp=2,tensor=2",
    cpu_devices=8,
    steps=40,
    seq_len=64,
    global_batch=16,
    run_dir="runs/own_data",
    **SIZES,
)
model = optimus_jax.load(result.run_dir)
print(model.generate("12 plus 7 is", max_new_tokens=12, temperature=0.0))
print(model.logits("12 plus 7 is").shape)
