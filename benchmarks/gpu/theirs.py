"""Measures one case in PyTorch. Prints a line of JSON. run.py starts it as `python theirs.py CASE`.

The model is transformers' GPT-2 or Llama of the same sizes, with float32 weights under bf16
autocast (or weights, gradients and moments all in bf16, if the case says so), SDPA, fused AdamW,
and gradients clipped like ours: what a user would write for simple, fast training. Two things that
a user might not know are done as well. SDPA gets `is_causal` and no mask: under torch.compile
transformers 5 makes a mask of [batch, 1, length, length], which flash attention does not support.
And the vocabulary is padded to a multiple of 128, like ours.
"""

import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Collection

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from cases import STEPS, WARMUP, Case, check_losses, read_case
from torch.profiler import ProfilerActivity, profile  # pyright: ignore[reportMissingImports]
from transformers import (
    AttentionInterface,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)  # pyright: ignore[reportMissingImports]
from transformers.integrations.sdpa_attention import (
    sdpa_attention_forward,
)  # pyright: ignore[reportMissingImports]

from optimus_jax.config.presets import model_preset
from optimus_jax.models.flops import step_flops

UNMASKED = "sdpa_without_masks"
"""Name of an attention implementation for which transformers makes no masks."""
ATTENTION = {"cudnn": "cudnn", "flash": "flash_(fwd|bwd)", "efficient": "fmha_cutlass"}
"""Kinds of attention -> pattern of the names of SDPA's kernels. The first match counts, because
cuDNN's names contain `flash` too."""


def model_of(case: Case) -> torch.nn.Module:
    """The model, created on the device, with transformers' own initial weights."""
    sizes = model_preset(case.model)
    AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    vocab_size = -(-sizes.vocab_size // 128) * 128
    common = {
        "vocab_size": vocab_size,
        "use_cache": False,
        "attn_implementation": UNMASKED,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if sizes.family == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                **common,
                n_positions=sizes.max_length,
                n_embd=sizes.embed_dim,
                n_layer=sizes.num_layers,
                n_head=sizes.num_heads,
                n_inner=sizes.mlp_dim,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                **common,
                hidden_size=sizes.embed_dim,
                intermediate_size=sizes.mlp_dim,
                num_hidden_layers=sizes.num_layers,
                num_attention_heads=sizes.num_heads,
                num_key_value_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                max_position_embeddings=max(case.seq_len, 2048),
                tie_word_embeddings=sizes.tied,
            )
        )
    if case.remat == "full":
        model.gradient_checkpointing_enable()
    return model


def train(case: Case, *, smoke: bool) -> dict:
    """Train on one device, and return the figures. Exits without a GPU, unless `smoke`."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not smoke:
        raise SystemExit(
            f"Error: PyTorch sees no GPU (torch {torch.__version__}, CUDA {torch.version.cuda})"
        )
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if case.weights == "bf16" else torch.float32)
    with torch.device(device):
        model = model_of(case)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu
    )
    # about like our warmup
    warm_up = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1 / (WARMUP + STEPS), total_iters=WARMUP + STEPS
    )
    tokens = torch.randint(
        0, model_preset(case.model).vocab_size, (case.batch, case.seq_len + 1), device=device
    )

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            logits = model(inputs).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    computed = torch.compile(loss_of) if case.who == "compile" else loss_of

    def step() -> torch.Tensor:
        loss = computed(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    started = time.perf_counter()
    first = step().item()
    first_s = time.perf_counter() - started
    times_s, loss = timed(step, on_gpu)
    check_losses(first, loss, model_preset(case.model).vocab_size)
    step_s, count = statistics.median(times_s), case.batch * case.seq_len
    return {
        "step_s": step_s,
        "spread_s": [min(times_s), max(times_s)],
        "tokens_per_s": count / step_s,
        "first_loss": first,
        "loss": loss,
        "tflops": (
            step_flops(model_preset(case.model), num_sequences=case.batch, seq_len=case.seq_len)
            / step_s
            / 1e12
        ),
        "compile_s": max(0.0, first_s - step_s) if case.who == "compile" else None,
        "graph_breaks": (
            sum(torch._dynamo.utils.counters["graph_break"].values())
            if case.who == "compile"
            else None
        ),
        # each retry waits for the device
        "allocation_retries": (
            torch.cuda.memory_stats().get("num_alloc_retries") if on_gpu else None
        ),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "attention": attention_of(step) if on_gpu else "sdpa",
        "version": (
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN"
            f" {torch.backends.cudnn.version()}, transformers {transformers.__version__}"
        ),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }


def attention_of(step: Callable[[], torch.Tensor]) -> str:
    """The SDPA kernels that a step runs, by the names that the profiler reports."""
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        return whose([event.key for event in seen.key_averages()])
    except RuntimeError as error:  # keep what was measured before
        return f"not known: {(str(error).splitlines() or [''])[0]}"


def whose(kernels: Collection[str]) -> str:
    """The kinds of attention among these kernel names; `math` if no name matches."""
    if not kernels:
        return "not known: the profiler saw no kernels"
    found = {
        next((kind for kind, sign in ATTENTION.items() if re.search(sign, name.lower())), "")
        for name in kernels
    }
    return ", ".join(kind for kind in ATTENTION if kind in found) or "math"


def timed(step: Callable[[], torch.Tensor], on_gpu: bool) -> tuple[list[float], float]:
    """Seconds of each step, and the last loss.

    A GPU's steps are timed by its own events, so that the host does not wait between them.
    """
    for _ in range(WARMUP):
        step()
    if not on_gpu:
        times_s = []
        for _ in range(STEPS):
            began_s = time.perf_counter()
            loss = step().item()
            times_s.append(time.perf_counter() - began_s)
        return times_s, loss
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        loss = step()
        mark.record()
    torch.cuda.synchronize()
    return [
        early.elapsed_time(late) / 1e3 for early, late in itertools.pairwise(marks)
    ], loss.item()


if __name__ == "__main__":
    case, smoke = read_case()
    print(json.dumps(train(case, smoke=smoke)))
