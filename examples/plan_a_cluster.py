"""Find the best layout of a model on GPUs that you do not have.

`python examples/plan_a_cluster.py` takes some seconds, and needs no accelerator.
"""

import optimus_jax

for ranked in optimus_jax.find_plans(model="llama3-8b", cluster="h100:8x8", seq_len=4096)[:3]:
    step_s, memory = ranked.prediction.step_time_s, ranked.memory.total
    print(f"{ranked.rank}. {ranked.plan.axes}: {step_s:.2f} s, {memory / 2**30:.1f} GiB predicted")
    print(f"   {ranked.why}")
