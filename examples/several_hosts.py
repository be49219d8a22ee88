"""Train on the devices of several hosts: the same script in each process is one run.

`python examples/several_hosts.py` takes half a minute on virtual devices of a CPU, in one process.
`torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST1:29400
examples/several_hosts.py` on each of two hosts makes a run of both; so do srun and mpirun.
"""

import os
import sys
from typing import Any

import optimus_jax

SIZES: dict[str, Any] = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 256}
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))

result = optimus_jax.train(
    "gpt2-nano",
    mesh="data=2,fsdp=4",
    cpu_devices=8 // PROCESSES,  # of this process; leave it out on GPUs
    steps=5,
    seq_len=64,
    global_batch=16,
    run_dir="runs/several_hosts",  # on a file system, or in a store, that all hosts see
    resume="auto",  # so that the same command goes on after a fault
    **SIZES,
)
print(f"{result.reason} on {result.plan.axes}: {result.final_loss:.3f}", flush=True)
sys.exit(result.exit_code)
