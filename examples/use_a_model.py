"""Load what a run has learnt: continue prompts, measure it on other texts, export it.

`python examples/use_a_model.py` takes half a minute on virtual devices of a CPU.
"""

from typing import Any

import optimus_jax

SIZES: dict[str, Any] = {
    "model.num_layers": 2,
    "model.embed_dim": 64,
    "model.head_dim": 8,
    "model.mlp_dim": 256,
}

run = optimus_jax.train(
    "gpt2-nano",
    data=[{"text": f"{number} is a number, and so is {number + 1}."} for number in range(2000)],
    mesh="fsdp=8",
    cpu_devices=8,
    steps=60,
    lr=3e-3,
    seq_len=64,
    global_batch=32,
    run_dir="runs/use_a_model",
    progress="none",
    **SIZES,
)
model = optimus_jax.load(run.run_dir, mesh="tensor=2")
prompts = ["12 is a ", "99 is a number, and "]
texts = model.generate(prompts, max_new_tokens=16, temperature=0.0)
for prompt, text in zip(prompts, texts, strict=True):
    print(repr(prompt + text))
print("most likely after '12 is a numbe':", chr(int(model.logits("12 is a numbe")[-1].argmax())))
others = [{"text": f"{number} is a number."} for number in range(2007, 2090, 9)]
measured = model.evaluate(data=others)
print(f"perplexity on other texts: {measured.perplexity:.2f}")
exported = model.export("exported/use_a_model").directory
print("for transformers:", *sorted(path.name for path in exported.iterdir()))
