"""Runs groups of processes, each group a run: python process_groups.py, with a line of JSON for
each group on standard input.

They are forked from this process, which has imported everything and has initialised nothing, so
that eight processes do not cost eight times the imports. A line gives `processes`, `devices` (of
each), `hosts` (of each process, invented) and `tasks`, which run one after the other: the arguments
of `optimus_jax.train`, or those of `training_loop` and `moves`, the meshes that the loop moves to
by the steps done. The answer is a line of JSON: for each process, its result of each task, or
its error.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
import traceback

import jax
import numpy as np
from jax.experimental import multihost_utils

import optimus_jax
from optimus_jax.devices import hosts
from optimus_jax.mesh.sharding import local_rows
from optimus_jax.planning.ahead_of_time import compiled_step
from optimus_jax.planning.ahead_of_time.compile_report import Allocated
from optimus_jax.planning.ahead_of_time.compiled_step import CompiledStep
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.run import inputs
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.trainer import Trainer

save = Trainer.save


def uncompiled(program, **_):
    """A compiled step that is never run."""
    return CompiledStep(
        program=program,
        train_step=None,
        allocated=Allocated(
            argument_bytes=0,
            temp_bytes=0,
            output_bytes=0,
            alias_bytes=0,
            capacity_bytes=None,
            headroom_share=0.0,
        ),
        compile_s=0.0,
    )


def main():
    for line in sys.stdin:
        group = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        pipes = [fork(group, number, address) for number in range(group["processes"])]
        answers = []
        for pid, read in pipes:
            with open(read) as file:
                answers.append(json.loads(file.read() or json.dumps("died without a word")))
            os.waitpid(pid, 0)
        print(json.dumps(answers), flush=True)


def fork(group, number, address):
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        os.dup2(2, 1)  # Gloo prints
        try:
            answer = [do(task, group, number, address) for task in group["tasks"]]
            if group["processes"] > 1:
                # all shut down together: a process left behind would be killed
                jax.distributed.shutdown()
        except BaseException:
            answer = traceback.format_exc()
        with contextlib.suppress(OSError), open(write, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(write)
    return pid, read


def do(task, group, number, address):
    jax.config.update("jax_platforms", "cpu")
    if group["hosts"] is not None:
        hosts._host = lambda: str(group["hosts"][number])
    distributed_settings = (
        {"coordinator": address, "num_processes": group["processes"], "process_id": number}
        if group["processes"] > 1
        else {"distributed.launcher": "none"}
    )
    rows = []
    inputs.local_rows = lambda *arguments: rows.append(local_rows(*arguments)) or rows[-1]
    # saving takes a sixth of the time
    Trainer.save = save if task.pop("saves", False) else lambda *_: None
    if task.get("resume"):
        compiled_step.compile_step = uncompiled  # no step is left to run
    task |= distributed_settings | {"cpu_devices": group["devices"]}
    if moves := task.pop("moves", None):
        return recorded(moving(task, moves))
    result = optimus_jax.train(**task)
    return recorded(result.run_dir) | {
        "rows": rows[-1].tolist(),
        "state": {name: whole(leaf) for name, leaf in named_leaves(result.state).items()},
    }


def recorded(run_dir):
    run = RunDirectory(run_dir)
    return {"losses": [record.loss for record in run.metrics()], "events": run.events()}


def moving(task, meshes):
    """The directory of a run whose loop moves to other meshes."""
    with optimus_jax.training_loop(**task) as loop:
        for batch in loop:
            loop.step(batch)
            if mesh := meshes.get(str(loop.steps_done)):
                loop.remesh(mesh)
    return loop.run_dir


def whole(leaf):
    """Digest of a leaf's bytes, wherever its shards are."""
    array = np.asarray(
        multihost_utils.process_allgather(leaf, tiled=True) if jax.process_count() > 1 else leaf
    )
    return hashlib.sha256(array.tobytes()).hexdigest()


if __name__ == "__main__":
    main()
