"""What is measured on one GPU, as data, the words for it, and what is no measurement."""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

Who = Literal["ours", "eager", "compile", "matmul"]
STEPS, WARMUP = 12, 3
"""Steps that count, after those that do not."""
FIRST_LOSS_OFF = 2.0
"""From that of guessing. Random logits of variance s^2 add s^2 / 2: 0.8 in llama3-8b, the widest
(4,096 features, standard deviation 0.02)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table; a process of its own."""

    who: Who
    """Us; transformers' model under PyTorch, eager or under torch.compile; or a product of matrices
    alone."""
    model: str = ""
    """A preset's name."""
    seq_len: int = 0
    """Tokens of an example."""
    batch: int = 0
    """Examples of a step; of a product, the side of its square matrices."""
    remat: str = "none"
    """What of forward is computed again: a policy of ours; of the others `none` or `full` (gradient
    checkpointing)."""
    weights: Literal["f32", "bf16"] = "f32"
    """What weights, gradients and moments of the others are kept in; ours are told by
    `settings`."""
    microbatches: int = 1
    """Parts that the batch is computed in; ours only."""
    packed: bool = False
    """Whether rows hold several documents that do not see each other; ours only."""
    settings: tuple[str, ...] = ()
    """Further ones, as for --set; ours only."""
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
"""One of each model of ours and its peers first, then what time suffices for: the rest is left out,
and said, as is what a card has no room for. The slowest to compile, by a guess, comes after eager
of the same shape. PyTorch has llama3-8b all in bf16, 8 bytes a parameter, as people train it on one
card: with float32 weights, gradients and moments, 16 bytes for each of 8.03 billion parameters, 141
GB have no room for its activations. Ours keeps all but the moments in float32 there, 12 bytes."""
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
"""What an option of XLA's is worth on one card, each beside none: what helps here goes into
optimus_jax/mesh/compiler.py."""
SMOKE = (
    Case(who="matmul", batch=512),
    _case("ours", "gpt2-nano", 128, 4),
    _case("eager", "gpt2-nano", 128, 4),
    _case("eager", "llama-nano", 128, 4, weights="bf16"),
)
"""For a machine without a GPU: that the script works. Its figures mean nothing."""


def read_case() -> tuple[Case, bool]:
    """The case that this process was started for, as JSON, and whether a CPU will do (--smoke)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=json.loads)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    return Case(**{**args.case, "settings": tuple(args.case["settings"])}), args.smoke


def as_argument(case: Case) -> str:
    """As `read_case` reads it."""
    return json.dumps(asdict(case))


def check_losses(first: float, last: float, vocab_size: int) -> None:
    """That the steps were training steps: from about what guessing gives, on one batch over and
    over, downwards. Exit if not.
    """
    if not abs(first - math.log(vocab_size)) < FIRST_LOSS_OFF or not last < first:
        raise SystemExit(
            f"Error: the loss went from {first} to {last}, and guessing gives"
            f" {math.log(vocab_size):.2f}: those were no training steps"
        )
