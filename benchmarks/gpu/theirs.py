"""One case under PyTorch: python theirs.py CASE, which prints a line of JSON. Started by run.py.

transformers' GPT-2 or Llama of the same sizes, float32 weights under bf16 autocast (or weights,
gradients and moments all in bf16, where a case says so), SDPA, fused AdamW, gradients clipped as
ours are: what somebody would write who wants it fast and plain. Two things they would have to know
are done for them: SDPA is told that attention is causal and given no mask (under torch.compile
transformers 5 makes one of [batch, 1, length, length], which flash attention cannot take), and the
vocabulary is a multiple of 128, as ours is.
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
"""A name for which transformers knows no way to make masks, and so makes none."""
ATTENTION = {"cudnn": "cudnn", "flash": "flash_(fwd|bwd)", "efficient": "fmha_cutlass"}
"""Of the name of a kernel that SDPA runs, what tells whose it is; the first counts, for cuDNN has
`flash` in its names too."""


def model_of(case: Case) -> torch.nn.Module:
    """Born on the device, with weights as transformers draws them."""
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
    """Steps on one device, which is a GPU unless a CPU will do."""
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
    # about as ours
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
        # each of them waits for the device
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
    """Which of SDPA's kernels a step runs, by the names that the profiler sees."""
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        return whose([event.key for event in seen.key_averages()])
    except RuntimeError as error:  # what was measured before stays
        return f"not known: {(str(error).splitlines() or [''])[0]}"


def whose(kernels: Collection[str]) -> str:
    """The kinds of attention among kernels, by name; `math` if none of them is known for
    another."""
    if not kernels:
        return "not known: the profiler saw no kernels"
    found = {
        next((kind for kind, sign in ATTENTION.items() if re.search(sign, name.lower())), "")
        for name in kernels
    }
    return ", ".join(kind for kind in ATTENTION if kind in found) or "math"


def timed(step: Callable[[], torch.Tensor], on_gpu: bool) -> tuple[list[float], float]:
    """Seconds of each step, on the device's own clock where it has one, so that nobody waits in
    between.
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
