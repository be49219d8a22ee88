"""Find the best layout of a model on GPUs that you do not have, and the command that uses it.

`python examples/plan_a_cluster.py` takes some seconds, and needs no accelerator.
"""

import optimus_jax

MODEL, LENGTH, BATCH = "llama3-8b", 4096, 512

ranking = optimus_jax.find_plans(
    model=MODEL, cluster="h100:8x8", seq_len=LENGTH, global_batch=BATCH
)
for ranked in ranking[:3]:
    step_s, memory = ranked.prediction.step_time_s, ranked.memory.total
    print(f"{ranked.rank}. {ranked.plan.axes}: {step_s:.2f} s, {memory / 2**30:.1f} GiB predicted")
    print(f"   {ranked.why}")
print(ranking[0].explain())
command = f"--model {MODEL} --seq-len {LENGTH} --global-batch {BATCH} {ranking[0].flags}"
print(f"under SLURM: RUN_DIR=/shared/run sbatch --nodes=8 deploy/slurm.sbatch {command}")
