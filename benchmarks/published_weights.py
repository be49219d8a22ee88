"""Seconds and peak memory of loading a published model of 1.2B parameters, beside plain reading of
its files and transformers.

    python benchmarks/published_weights.py make --dir /tmp/model
    python benchmarks/published_weights.py measure --dir /tmp/model

`make` writes random weights in bfloat16, with the sizes of Llama 3.2 1B. `measure` loads them, each
time in new processes: onto 8 virtual devices under several meshes, in one process and in two; all
tensors one after the other, without devices, here and by the safetensors library; and with
`transformers.from_pretrained` in float32 and bfloat16, on one device. Files are in the page cache.
*Own* memory is the peak of a process's resident set over that before loading, less the shards,
which lie on the host here: the limit is 1.2 times the largest tensor.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from optimus_jax.system.paths import path_argument

NUM_DEVICES = 8
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""Sizes of Llama 3.2 1B (its config.json on the Hugging Face hub)."""
LOADS = {
    "fsdp=8": ("ours", "fsdp=8", 1),
    "data=2, fsdp=4": ("ours", "data=2,fsdp=4", 1),
    "tensor=2, fsdp=4": ("ours", "fsdp=4,tensor=2", 1),
    "pipe=4, tensor=2": ("ours", "pipe=4,tensor=2", 1),
    "fsdp=8, two processes": ("ours", "fsdp=8", 2),
    "files read alone, as here": ("read", "ours", 1),
    "files read alone, safetensors": ("read", "safetensors", 1),
    "transformers, float32": ("transformers", "float32", 1),
    "transformers, bfloat16": ("transformers", "bfloat16", 1),
}
"""What is measured: by what, how, and in how many processes."""


def make(directory: Path) -> None:
    """Write the model."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from optimus_jax.models.huggingface import config_from_huggingface
    from optimus_jax.models.huggingface_formats import family_format
    from optimus_jax.models.huggingface_tensors import tensor_shapes

    directory.mkdir(parents=True)
    prefix = family_format("llama").prefix
    rng = np.random.default_rng(0)
    tensors = {
        prefix + name: torch.from_numpy(rng.standard_normal(shape, np.float32)).to(torch.bfloat16)
        for name, shape in tensor_shapes(config_from_huggingface(CONFIG)).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))


def measure(directory: Path) -> None:
    """Run every load in processes of its own, and print its figures."""
    size = (directory / "model.safetensors").stat().st_size
    largest = CONFIG["vocab_size"] * CONFIG["hidden_size"]
    print(
        f"{size / 1e9:.2f} GB of bfloat16; largest tensor {2 * largest / 1e9:.2f} GB in the file,"
        f" {4 * largest / 1e9:.2f} GB in float32"
    )
    (directory / "model.safetensors").read_bytes()  # into the page cache
    for name, (by, how, num_processes) in LOADS.items():
        command = [sys.executable, __file__, "load", "--dir", str(directory), "--by", by]
        workers = [
            subprocess.Popen(
                [*command, "--how", how, "--process", f"{index}/{num_processes}"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(num_processes)
        ]
        for worker in workers:
            text = worker.communicate()[0]
            assert worker.returncode == 0, name
            found = json.loads(text.splitlines()[-1])
            print(
                f"{name}: {found['wall_s']:.1f} s, {found['cpu_s']:.1f} CPU-s; peak"
                f" {found['peak'] / 1e9:.2f} GB above before; kept {found['kept'] / 1e9:.2f} GB;"
                f" own {(found['peak'] - found['kept']) / 1e9:.2f} GB"
            )


def load(directory: Path, by: str, how: str, process: str) -> None:
    """Load the model in this process, and print the figures as JSON."""
    index, num_processes = map(int, process.split("/"))
    run = {"ours": _ours, "read": _read, "transformers": _transformers}[by]
    prepared = run(directory, how, index, num_processes)
    before, wall, cpu = _memory("VmRSS"), time.perf_counter(), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    kept = prepared()
    figures = {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak": _memory("VmHWM") - before,
        "kept": kept,
    }
    print(json.dumps(figures), flush=True)
    if num_processes > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("loaded")
    os._exit(0)


def _ours(directory: Path, mesh: str, index: int, num_processes: int):
    from optimus_jax.devices.cpu import use_cpu_devices

    use_cpu_devices(NUM_DEVICES // num_processes)
    import jax

    if num_processes > 1:
        jax.distributed.initialize("127.0.0.1:29871", num_processes, index)
    from optimus_jax.config.request import make_config
    from optimus_jax.mesh.build import discover
    from optimus_jax.planning.search.assemble import plan_for
    from optimus_jax.run.published_weights import read_params
    from optimus_jax.training.step import build_program
    from optimus_jax.weights.directory import open_model
    from optimus_jax.weights.published import model_named

    config = make_config(
        model_named(str(directory)), {"mesh": mesh, "global_batch": 8, "seq_len": 128}
    )
    axes = config.parallel.axes
    assert axes is not None, mesh
    program = build_program(config, plan_for(config, axes, discover()))

    def run() -> int:
        model = open_model(directory)
        params = read_params(
            model.tensors, program.shapes, program.abstract_params(config.model.tuning)
        )
        jax.block_until_ready(params)
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(params)
            for shard in leaf.addressable_shards
        )

    return run


def _read(directory: Path, how: str, index: int, num_processes: int):
    import numpy as np
    from safetensors import safe_open

    from optimus_jax.weights.directory import open_model

    def run() -> int:
        if how == "ours":
            for tensor in open_model(directory).tensors.values():
                np.asarray(tensor)
            return 0
        with safe_open(directory / "model.safetensors", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name).clone()  # without a copy, nothing would be read
        return 0

    return run


def _transformers(directory: Path, dtype: str, index: int, num_processes: int):
    import torch
    import transformers

    def run() -> int:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype)
        )
        return sum(each.numel() * each.element_size() for each in model.parameters())

    return run


def _memory(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("make", "measure", "load"))
    parser.add_argument("--dir", type=path_argument, required=True, help="the model's directory")
    parser.add_argument("--by", default="ours", help=argparse.SUPPRESS)
    parser.add_argument("--how", default="fsdp=8", help=argparse.SUPPRESS)
    parser.add_argument("--process", default="0/1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "load":
        load(args.dir, args.by, args.how, args.process)
    else:
        {"make": make, "measure": measure}[args.what](args.dir)


if __name__ == "__main__":
    main()
