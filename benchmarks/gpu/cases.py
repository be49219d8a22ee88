"""The cases that are measured on one GPU, their names, and the check that a case really trained."""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

Who = Literal["ours", "eager", "compile", "matmul"]
STEPS, WARMUP = 12, 3
"""Steps that are measured, and steps before them that are not."""
FIRST_LOSS_OFF = 2.0
"""Allowed difference of the first loss from log(vocab_size), the loss of a uniform guess. Random
logits of variance s^2 add s^2 / 2: 0.8 in llama3-8b, the widest model (4,096 features, standard
deviation 0.02)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table, measured in its own process."""

    who: Who
    """This project; transformers' model in PyTorch, eager or with torch.compile; or only a matrix
    product."""
    model: str = ""
    """Name of the model preset."""
    seq_len: int = 0
    """Tokens per example."""
    batch: int = 0
    """Examples per step; for a matrix product, the size of its square matrices."""
    remat: str = "none"
    """Remat policy. PyTorch's cases know only `none` and `full` (gradient checkpointing)."""
    weights: Literal["f32", "bf16"] = "f32"
    """Dtype of weights, gradients and moments in PyTorch's cases. In ours `settings` choose it."""
    microbatches: int = 1
    """Number of microbatches; ours only."""
    packed: bool = False
    """Whether rows hold several documents that do not attend to each other; ours only."""
    settings: tuple[str, ...] = ()
    """Further settings, as for --set; ours only."""
    xla_flags: str = ""
    """Added to XLA_FLAGS; ours only."""

    def __str__(self) -> str:
        if self.who == "matmul":
            return f"bf16 {self.batch} x {self.batch} x {self.batch}"
        more = (
            ["all in bf16"] * (self.weights == "bf16")
            + ["packed"] * self.packed
            + [f"remat {self.remat}"] * (self.remat != "none")
            + [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
            + [*self.settings, *self.xla_flags.split()]
        )
        return ", ".join([f"{self.model} {self.batch} x {self.seq_len}", *more])


def _case(who: Who, model: str, seq_len: int, batch: int, **more) -> Case:
    return Case(who=who, model=model, seq_len=seq_len, batch=batch, **more)


CASES = (
    Case(who="matmul", batch=8192),
    _case("ours", "gpt2-xl", 1024, 16),
    _case("ours", "gpt2", 1024, 32),
    _case("ours", "llama3.2-1b", 4096, 4),
    _case("ours", "llama3-8b", 4096, 2, settings=("precision.moments=bf16",)),
    _case("compile", "gpt2", 1024, 32),
    _case("compile", "llama3.2-1b", 4096, 4),
    _case("compile", "llama3-8b", 4096, 2, weights="bf16"),
    _case("eager", "gpt2-xl", 1024, 16),
    _case("compile", "gpt2-xl", 1024, 16),
    _case("eager", "gpt2", 1024, 32),
    _case("eager", "llama3.2-1b", 4096, 4),
    _case(
        "ours",
        "llama3-8b",
        4096,
        4,
        settings=("model.tuning.method=lora", "model.tuning.base_precision=bf16"),
    ),
    _case(
        "ours",
        "llama3-8b",
        4096,
        4,
        settings=("model.tuning.method=lora", "model.tuning.base_precision=nf4"),
    ),
    _case("ours", "gpt2-xl", 1024, 16, packed=True),
    _case("ours", "gpt2-xl", 1024, 32),
    _case("ours", "gpt2-xl", 1024, 16, remat="selective"),
    _case("ours", "llama3.2-1b", 8192, 2),
    _case("ours", "gpt2", 1024, 64),
    _case("ours", "llama3.2-1b", 4096, 8),
    _case("ours", "gpt2-xl", 1024, 64, microbatches=4),
    _case("ours", "gpt2-xl", 1024, 32, remat="full"),
    _case("ours", "llama3.2-1b", 4096, 2),
    _case("ours", "llama3.2-1b", 4096, 4, remat="dots"),
    _case("ours", "llama3.2-1b", 4096, 16, remat="full"),
    _case("ours", "gpt2", 1024, 16),
    _case("ours", "gpt2", 1024, 32, remat="dots"),
    _case("ours", "gpt2", 1024, 128, remat="full"),
    _case("ours", "llama3-8b", 8192, 1, settings=("precision.moments=bf16",)),
    _case("ours", "llama3-8b", 4096, 1, remat="full"),
    _case("ours", "llama3-8b", 4096, 1, remat="full", settings=("parallel.offload=optimizer",)),
    _case("ours", "llama3-8b", 4096, 2, remat="full", settings=("parallel.offload=all",)),
    _case("ours", "gpt2-xl", 1024, 8),
    _case("eager", "gpt2-xl", 1024, 8),
    _case("eager", "gpt2-xl", 1024, 32, remat="full"),
    _case("eager", "llama3-8b", 4096, 2, weights="bf16", remat="full"),
)
"""The cases in order: first one case per model for us and for PyTorch, then as many as the time
allows. Cases that do not fit into the time or the memory appear in the table as left out. The case
that probably compiles slowest comes after the eager case of the same shape.

PyTorch trains llama3-8b all in bf16, 8 bytes per parameter, as users do on one GPU. With float32
weights, gradients and moments it needs 16 bytes for each of 8.03 billion parameters, which leaves
no room for activations in 141 GB. Ours keeps only the moments in bf16 there, 12 bytes per
parameter."""
EXPERIMENTS = tuple(
    _case("ours", "gpt2-xl", 1024, 16, xla_flags=flags)
    for flags in (
        "",
        "--xla_gpu_enable_triton_gemm=false",
        "--xla_gpu_enable_cublaslt=true",
        "--xla_gpu_enable_dynamic_slice_fusion=true",
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "--xla_gpu_autotune_level=0",
    )
)
"""Experiments with single XLA options, compared with no option. Options that help belong in
optimus_jax/mesh/xla_options.py."""
SMOKE = (
    Case(who="matmul", batch=512),
    _case("ours", "gpt2-nano", 128, 4),
    _case("eager", "gpt2-nano", 128, 4),
    _case("eager", "llama-nano", 128, 4, weights="bf16"),
)
"""Small cases that show on a machine without a GPU that the script works. Their figures mean
nothing."""


def read_case() -> tuple[Case, bool]:
    """The case on this process's command line, and whether a CPU is enough (--smoke)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=json.loads)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    return Case(**{**args.case, "settings": tuple(args.case["settings"])}), args.smoke


def as_argument(case: Case) -> str:
    """The case as the JSON that `read_case` reads."""
    return json.dumps(asdict(case))


def check_losses(first: float, last: float, vocab_size: int) -> None:
    """Exit unless the losses are those of training on one repeated batch.

    The first loss must be near that of a uniform guess, and the last must be lower.
    """
    if not abs(first - math.log(vocab_size)) < FIRST_LOSS_OFF or not last < first:
        raise SystemExit(
            f"Error: the loss went from {first} to {last}, and a uniform guess has"
            f" {math.log(vocab_size):.2f}: those were no training steps"
        )
