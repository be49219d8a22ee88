"""What settings are called elsewhere: in Hugging Face's Trainer and Accelerate, Megatron-LM,
DeepSpeed, MaxText, torchtitan, NeMo, Lightning, nanotron, nanoGPT, nanochat, Levanter, axolotl,
LLaMA-Factory and LitGPT.

Two tables. A word of ALIASES means the same as a setting of ours, in the same unit, and is taken
for it. A word of ADVICE means something else, something that we count otherwise, or nothing that
there is: what to write instead is said, computed from the value where that is possible. No word is
in both, and none is a setting of ours; a test holds that, and that every name to write is one that
there is.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from optimus_jax.errors import closest, likeness

PARAMETERS = ("model", "config", "run_dir")
"""Targets that are no settings but arguments of `train`, and flags."""

_ALIASES = {
    "model": "model_name",
    "run_dir": "output_dir out_dir output_directory",
    "steps": (
        "max_steps train_iters max_iters train_steps num_train_steps total_steps num_steps"
        " training_steps total_training_steps num_iterations max_train_steps iters num_iters"
        " iterations n_steps"
    ),
    "seed": "random_seed rng_seed manual_seed seed_everything",
    "eval_every": "eval_interval eval_freq eval_frequency evaluation_interval steps_per_eval",
    "data.sources": "train_file train_files",
    "data.tokenizer": "tokenizer_path tokenizer_file",
    "data.text_field": "text_column text_column_name dataset_text_field text_key",
    "data.seq_len": (
        "seq_length sequence_length sequence_len max_seq_length max_seq_len block_size"
        " max_target_length train_seq_len cutoff_len"
    ),
    "data.global_batch": "global_batch_size",
    "optimizer.lr": "learning_rate peak_lr peak_learning_rate max_lr lr_max",
    "optimizer.warmup_steps": (
        "warmup_steps num_warmup_steps warmup_iters lr_warmup_iters lr_warmup_steps"
        " warmup_num_steps"
    ),
    "optimizer.min_lr_ratio": (
        "min_lr_ratio min_lr_factor min_lr_rate final_lr_frac learning_rate_final_fraction"
        " cosine_learning_rate_final_fraction"
    ),
    "optimizer.beta1": "beta1 adam_beta1 adam_b1 b1",
    "optimizer.beta2": "beta2 adam_beta2 adam_b2 b2",
    "optimizer.epsilon": "adam_epsilon adam_eps optimizer_epsilon",
    "optimizer.weight_decay": "weight_decay adam_weight_decay wd",
    "optimizer.clip_norm": (
        "clip_norm max_grad_norm clip_grad grad_clip gradient_clipping gradient_clip_val"
        " gradient_clipping_threshold max_norm clip_grad_norm gradient_max_norm clip_gradients"
    ),
    "checkpoint.every": (
        "save_steps save_interval save_every save_freq checkpoint_interval checkpoint_period"
        " save_frequency checkpoint_freq ckpt_every save_checkpoint_steps checkpoint_every_n_steps"
        " every_n_train_steps"
    ),
    "checkpoint.keep": "save_total_limit keep_latest_k max_to_keep max_num_checkpoints_to_keep",
    "log.every": (
        "logging_steps log_interval log_freq log_every log_every_n_steps logging_interval"
        " log_period"
    ),
    "parallel.microbatches": "num_microbatches n_microbatches num_pipeline_microbatches",
    "parallel.zero": "zero_stage zero_optimization.stage",
    "parallel.repeats": "virtual_pipeline_model_parallel_size",
    "model.vocab_size": "vocab_size n_vocab",
    "model.num_layers": (
        "num_layers num_hidden_layers n_layer n_layers num_decoder_layers base_num_decoder_layers"
        " num_transformer_layers"
    ),
    "model.embed_dim": "embed_dim hidden_size d_model n_embd emb_dim base_emb_dim model_dim",
    "model.num_heads": (
        "num_heads num_attention_heads n_head n_heads num_query_heads base_num_query_heads nhead"
    ),
    "model.num_kv_heads": (
        "num_kv_heads num_key_value_heads n_kv_heads n_kv_head num_query_groups base_num_kv_heads"
    ),
    "model.head_dim": "head_dim kv_channels head_size",
    "model.mlp_dim": "mlp_dim intermediate_size ffn_hidden_size ffn_dim d_ff n_inner base_mlp_dim",
    "model.max_length": "max_position_embeddings n_positions n_ctx",
    "model.norm_epsilon": (
        "norm_epsilon norm_eps rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon"
        " normalization_layer_epsilon"
    ),
    "model.rope_theta": "rope_theta rotary_base rope_base rope_max_timescale",
    "model.init_std": "initializer_range init_method_std",
    "model.dropout": "dropout dropout_rate dropout_p",
    "model.tied": (
        "tie_word_embeddings tie_embeddings weight_tying logits_via_embedding tied_embeddings"
    ),
}
ALIASES: Mapping[str, str] = {
    word: target for target, words in _ALIASES.items() for word in words.split()
}
"""Word to the dotted name of a setting, or one of PARAMETERS."""

Others = Mapping[str, Any]
"""What else was given: words, as `word` has them, to values."""
Advice = str | Callable[[str, Others], str]
"""What to write, with `{value}` for what was given; or what makes that of the value and of what
else was given."""

MESH_WORDS = {
    "tensor": (
        "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree"
        " tensor_parallelism tensor_model_parallel_size model_parallel_size ici_tensor_parallelism"
    ),
    "pipe": (
        "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree"
        " pipeline_parallelism pipeline_model_parallel_size num_stages ici_pipeline_parallelism"
        " pipeline"
    ),
    "data": (
        "dp dp_size dp_degree dp_replicate data_parallel data_parallel_size data_parallel_degree"
        " data_parallelism data_parallel_replicate_degree ici_data_parallelism dcn_data_parallelism"
        " replica ddp"
    ),
    "fsdp": (
        "fsdp_size fsdp_degree dp_shard data_parallel_shard_degree fsdp_parallelism"
        " ici_fsdp_parallelism shard sharding_degree"
    ),
}
"""Axes of our mesh, and what they are called elsewhere; also as axes of a mesh that is written
out."""
AXIS_OF: Mapping[str, str] = {
    word: axis for axis, words in MESH_WORDS.items() for word in words.split()
}

_NO_AXIS = (
    "cp cp_size context_parallel context_parallel_size context_parallel_degree sp sp_size"
    " sequence_parallel sequence_parallel_size ep ep_size expert_parallel expert_parallel_size"
    " expert_parallel_degree expert_model_parallel_size ulysses_degree ring_attention num_experts"
)
_DEVICES = (
    "num_gpus n_gpus n_gpu gpus num_devices n_devices devices ngpu num_gpus_per_node gpus_per_node"
    " n_gpus_per_node nproc_per_node nproc num_accelerators"
)
_PER_DEVICE = (
    "micro_batch_size micro_batch per_device_batch per_device_train_batch_size"
    " per_device_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu"
    " device_batch_size local_batch_size per_device_parallelism microbatch_size mbs"
    " pipeline_parallel_microbatch_size"
)


def word(name: str) -> str:
    """A name as the tables have it: no dashes in front, underscores inside, lower case."""
    return name.lstrip("-").replace("-", "_").lower()


TRAINING = {"trainer", "training", "train", "training_args", "train_args", "args", "hparams"}
"""Sections of other frameworks' configs, in which a word means what it means alone."""
_OWN = {
    target.rpartition(".")[2]: target
    for target in _ALIASES
    if sum(other.endswith(f".{target.rpartition('.')[2]}") for other in _ALIASES) <= 1
}
_SECTIONS = {target.partition(".")[0] for target in _ALIASES if "." in target}
"""Ours: a word of another framework is not meant by them."""


def alias_of(name: str) -> str | None:
    """The setting, or parameter, that a word of another framework means; None: none, or not for
    certain.

    A section in front has to be that of the setting, `optimizer.learning_rate`, or another
    framework's for training, `trainer.max_steps`.
    """
    section, dot, leaf = word(name).rpartition(".")
    last_two = ".".join(word(name).split(".")[-2:])
    target = (
        ALIASES.get(last_two)
        or ALIASES.get(leaf)
        or (_OWN.get(leaf) if section in TRAINING else None)
    )
    is_there = (
        not dot
        or last_two in ALIASES
        or section in TRAINING
        or (target or "").rpartition(".")[0] == section
    )
    return target if target is not None and is_there and target != name else None


def meant_by_last_part(name: str) -> str | None:
    """The setting that the last part of a dotted name would mean without its section, which is in
    doubt; None: it is no word of the tables.
    """
    section, _, leaf = word(name).rpartition(".")
    # a word of training means something else there
    if not section or any(part.startswith(("eval", "val", "test")) for part in section.split(".")):
        return None
    return ALIASES.get(leaf) or _OWN.get(leaf)


def advice_for(name: str, value: object = None, others: Others | None = None) -> str | None:
    """What to write instead of a word of another framework; None: it is not in the table.

    Args:
      name: as typed; of a dotted one the whole, the last part or the first is the word.
      value: as typed; None: it stood alone.
      others: what else was given, to be computed with.
    """
    whole = word(name)
    section, dot, _ = whole.partition(".")
    is_foreign = not (dot and section in _SECTIONS) and not meant_by_last_part(name)
    parts = [
        whole,
        ".".join(whole.split(".")[-2:]),
        whole.rpartition(".")[2],
        *([section] if is_foreign else []),
    ]
    advice = next((ADVICE[each] for each in parts if each in ADVICE), None)
    others = {each.rpartition(".")[2]: given for each, given in (others or {}).items()} | dict(
        others or {}
    )
    text = "N" if value is None else str(value)[:100]
    return (
        advice
        if advice is None
        else advice.replace("{value}", text)
        if isinstance(advice, str)
        else advice(text, others)
    )


MISSPELLED = 0.8
"""Least likeness of a name to a word of the tables of which it may be a slip."""


def spelled_like(
    name: str, known: Iterable[str], value: object = None, others: Others | None = None
) -> str | None:
    """What to do about a name that is in no table: which known name, or word of the tables, is
    spelled like it. None: nothing is.
    """
    known = list(known)
    close, foreign = closest(name, known), closest(name, [*ALIASES, *ADVICE])
    if (
        foreign is not None
        and likeness(name, foreign) >= MISSPELLED
        and (close is None or likeness(name, close) < likeness(name, foreign))
    ):
        return (
            f"did you mean {foreign!r}, which is {ALIASES[foreign]} here?"
            if foreign in ALIASES
            else f"did you mean {foreign!r}? {advice_for(foreign, value, others)}"
        )
    return None if close is None else f"did you mean {close!r}?"


def _number(others: Others, *names: str) -> int | None:
    """The first of these that was given and is a whole number."""
    return next(
        (
            int(text)
            for name in names
            if re.fullmatch(r"\d{1,9}", text := str(others.get(name, "")).strip())
        ),
        None,
    )


def _global_batch(others: Others) -> int | None:
    return _number(others, "global_batch", "data.global_batch", "global_batch_size")


def _steps(others: Others) -> int | None:
    return _number(others, "steps", *_ALIASES["steps"].split())


def _num_devices(others: Others) -> int | None:
    cluster = re.search(r":(?:(\d{1,6})x)?(\d{1,6})$", str(others.get("cluster", "")))
    return _number(others, "cpu_devices", *_DEVICES.split(), "world_size") or (
        int(cluster[1] or 1) * int(cluster[2]) if cluster else None
    )


def _mesh(value: str, others: Others) -> str:
    """All axes that were given, in one mesh."""
    sizes = {
        axis: size
        for axis, words in MESH_WORDS.items()
        if (size := _number(others, *words.split())) is not None and size > 1
    }
    axes = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    if not axes:
        return (
            "leave it out: an axis of size 1 is not written; --mesh auto, the default, chooses all"
            " of them"
            if value == "1"
            else (
                "write --mesh with sizes whose product is the number of devices, such as --mesh"
                " tensor=2,fsdp=4"
            )
        )
    return (
        f"write --mesh {axes},... with sizes of data, fsdp, tensor and pipe whose product is the"
        " number of devices, or leave all to --mesh auto"
    )


def _no_axis(value: str, _: Others) -> str:
    return (
        "leave it out, 1 means none"
        if value in ("1", "false", "False")
        else "not supported: the mesh has the axes data, fsdp, tensor and pipe; leave it out"
    )


def _per_device(value: str, others: Others) -> str:
    each, devices = _number({"each": value}, "each"), _num_devices(others)
    parts = _number(others, *_ACCUMULATION.split()) or 1
    if each and devices and (batch := _global_batch(others)):
        return (
            f"leave it out: --global-batch {batch} is of a whole step; {each} at a time on"
            f" {devices} devices that all hold different examples is --microbatches"
            f" {max(1, batch // (each * devices))}"
        )
    if each and devices:
        return (
            f"batches are counted over all devices: {each} on each of {devices} data-parallel"
            f" devices{f' x {parts} accumulated' if parts > 1 else ''} is --global-batch"
            f" {each * devices * parts}" + (f" --microbatches {parts}" if parts > 1 else "")
        )
    return (
        f"batches are counted over all devices: --global-batch is {value} x the devices of data and"
        " fsdp x the microbatches (--microbatches, gradients of which are added)"
    )


_ACCUMULATION = (
    "gradient_accumulation_steps grad_accum grad_accum_steps gradient_accumulation"
    " accumulate_grad_batches grad_acc_steps accumulation_steps batch_accumulation_per_replica"
)


def _accumulation(value: str, others: Others) -> str:
    return (
        f"write --microbatches {value}: parts of a step's batch, gradients of which are added;"
        " --global-batch counts the examples of all of them"
        + (
            f", {_per_device(str(each), others)}"
            if (each := _number(others, *_PER_DEVICE.split()))
            else ""
        )
    )


def _share_of_steps(value: str, others: Others) -> str:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    steps = _steps(others)
    number = (
        f"{round(share * steps)} ({share:g} of {steps} steps)"
        if steps and 0 <= share <= 1
        else "N, a number of steps"
    )
    return (
        f"write --set optimizer.warmup_steps={number}; left open, it is 5% of all steps, at most"
        " 2000"
    )


def _least_lr(value: str, others: Others) -> str:
    try:
        share = float(value) / float(
            next(
                others[name]
                for name in ("lr", "optimizer.lr", *_ALIASES["optimizer.lr"].split())
                if name in others
            )
        )
        if not math.isfinite(share):
            raise ValueError
    except (ValueError, ZeroDivisionError, StopIteration, TypeError):
        return (
            f"write --set optimizer.min_lr_ratio=X, the last learning rate over the peak: {value} /"
            " the value of --lr"
        )
    return f"write --set optimizer.min_lr_ratio={share:g}, the last learning rate over the peak"


def _samples(value: str, others: Others) -> str:
    number, batch = _number({"number": value}, "number"), _global_batch(others)
    return (
        f"write --steps {-(-number // batch)}: {number:,} examples in steps of {batch}"
        if number and batch
        else "write --steps N: examples / --global-batch"
    )


def _percent(value: str, _: Others) -> str:
    try:
        if not math.isfinite(share := float(value) / 100):
            raise ValueError
        return f"write --set data.eval_fraction={share:g}, a share of the documents"
    except ValueError:
        return "write --set data.eval_fraction=0.01, a share of the documents"


def _precision(value: str, _: Others) -> str:
    name = VALUES["precision.compute"].get(
        value.lower(), value.lower() if value.lower() in ("bf16", "f16", "f32") else None
    )
    return (
        f"write --precision {name}"
        if name
        else "write --precision bf16, f16 or f32 (default: bf16 on GPUs that have it)"
    )


def _coordinator(value: str, _: Others) -> str:
    return (
        f"write --coordinator {value if value.rpartition(':')[2].isdecimal() else f'{value}:PORT'}"
        " --num-processes N --process-id I, or let a launcher say so"
    )


def _rank(value: str, _: Others) -> str:
    return (
        "leave it out: -1 says that nothing is distributed"
        if value == "-1"
        else (
            f"write --process-id {value} with --coordinator HOST:PORT --num-processes N, or let a"
            " launcher say so"
        )
    )


def _switch(advice: str) -> Callable[[str, Others], str]:
    """Advice on what is turned on: turned off, it is to be left out."""
    return lambda value, _: (
        "leave it out: it is off"
        if value.lower() in ("false", "0", "no", "off", "none")
        else advice
    )


def _recomputing(value: str, _: Others) -> str:
    name = {
        "selective": "selective",
        "full": "full",
        "block": "full",
        "uniform": "full",
        "none": "none",
        "false": "none",
        "0": "none",
        "off": "none",
        "dots": "dots",
    }.get(value.lower(), "full")
    return f"write --remat {name} (none, selective, dots, full; default: the least that fits)"


def _tracker(value: str, _: Others) -> str:
    if value.lower() in ("none", "false", "0", "off", "disabled"):
        return (
            "leave it out: nothing is reported anywhere unless asked for; metrics.jsonl in the run"
            " directory has every step"
        )
    if value.lower() == "tensorboard":
        return "write --set log.tensorboard=true"
    return (
        "not supported; every step is in metrics.jsonl of the run directory, and --set"
        " log.tensorboard=true writes for TensorBoard"
    )


VALUES: Mapping[str, Mapping[str, str]] = {
    "precision.compute": {
        each: ours
        for ours, words in {
            "bf16": "bfloat16 bf16-mixed bf16-true bf16_mixed torch.bfloat16 jnp.bfloat16",
            "f16": "fp16 float16 half 16 16-mixed 16-true fp16-mixed torch.float16 jnp.float16",
            "f32": (
                "fp32 float32 float 32 32-true full single no none torch.float32 jnp.float32 tf32"
            ),
        }.items()
        for each in words.split()
    },
    "parallel.remat": {
        "true": "full",
        "1": "full",
        "block": "full",
        "uniform": "full",
        "minimal": "dots",
        "save_dot": "dots",
        "attention": "selective",
        "false": "none",
        "0": "none",
        "off": "none",
        "no": "none",
    },
    "parallel.schedule": {
        "interleaved1f1b": "interleaved",
        "interleaved_1f1b": "interleaved",
        "interleaved-1f1b": "interleaved",
        "one_f_one_b": "1f1b",
        "pipedream": "1f1b",
    },
    "optimizer.schedule": {
        "constant_with_warmup": "constant",
        "cosine_with_warmup": "cosine",
        "cosineannealing": "cosine",
        "cosine_annealing": "cosine",
        "linear_with_warmup": "linear",
        "warmup_stable_decay": "wsd",
        "warmup-stable-decay": "wsd",
        "trapezoidal": "wsd",
    },
    "parallel.attention": {
        "flash_attention_2": "cudnn",
        "flash": "cudnn",
        "flash_attention": "cudnn",
        "cudnn_flash_te": "cudnn",
        "sdpa": "xla",
        "eager": "xla",
        "dot_product": "xla",
    },
    "control": {
        "true": "auto",
        "on": "auto",
        "1": "auto",
        "false": "off",
        "0": "off",
        "none": "off",
    },
}
"""What the values of some settings are called elsewhere: each is answered with ours."""


_ADVICE: dict[str, Advice] = {
    " ".join(AXIS_OF): _mesh,
    _NO_AXIS: _no_axis,
    _PER_DEVICE: _per_device,
    _ACCUMULATION: _accumulation,
    "batch_size bs": (
        "write --global-batch {value} if that counts the examples of a step on all devices; if it"
        " counts those of one device, {value} x the devices of data and fsdp (x accumulation)"
    ),
    "train_batch_size": (
        "write --global-batch {value} if that counts the examples of a step on all devices"
        " (DeepSpeed, Levanter); otherwise {value} x the devices"
    ),
    "total_batch_size tokens_per_batch batch_tokens tokens_per_step max_tokens_per_batch": (
        "write --global-batch N, which counts examples: tokens / --seq-len"
    ),
    "eval_batch_size per_device_eval_batch_size valid_batch_size": (
        "leave it out: evaluation runs in the batches of training"
    ),
    "eval_iters eval_iterations num_eval_batches": (
        "write --set evaluation.examples=N, counted in examples rather than batches"
    ),
    "eval_steps val_check_interval": (
        "write --eval-every {value}, if it is the number of steps between evaluations; how much is"
        " evaluated is --set evaluation.examples"
    ),
    "num_train_epochs num_epochs epochs max_epochs": (
        "write --steps N: {value} x tokens of the data / (--global-batch x --seq-len);"
        " scripts/profile.py --data counts them"
    ),
    "train_samples num_train_samples": _samples,
    "train_tokens num_tokens max_tokens total_tokens target_tokens": (
        "write --steps N: tokens / (--global-batch x --seq-len)"
    ),
    "context_length context_len context_size ctx_len": (
        "write --seq-len {value} for the tokens of an example, and --set model.max_length={value}"
        " for positions of the model"
    ),
    "warmup_ratio warmup_fraction lr_warmup_fraction warmup_steps_fraction warmup": _share_of_steps,
    "min_lr min_learning_rate lr_min end_lr lr_end final_lr": _least_lr,
    "lr_scheduler_type lr_scheduler lr_decay_style lr_schedule decay_type scheduler lr_decay": (
        "write --set optimizer.schedule={value} (cosine, linear, wsd, constant); it ends at "
        "optimizer.min_lr_ratio of the peak, 0.1 unless set"
    ),
    "lr_decay_iters lr_decay_steps decay_steps warmdown_ratio": (
        "leave it out: the rate decays until --steps; with --set optimizer.schedule=wsd over"
        " optimizer.decay_fraction"
    ),
    "optim optimizer optimizer_name optimizer_type": (
        "leave it out: the optimizer is AdamW, with the settings optimizer.*"
    ),
    "bf16 bfloat16": _switch("write --precision bf16"),
    "fp16 float16 half": _switch("write --precision f16"),
    "fp32 float32": _switch("write --precision f32"),
    "dtype torch_dtype mixed_precision mixed_precision_param param_dtype compute_dtype autocast amp": (
        _precision
    ),
    "ckpt_dir save_dir checkpoint_dir checkpoint_path save_path save checkpoints_path base_output_directory dump_folder exp_dir log_dir logging_dir work_dir": (
        "write --run-dir {value}, a directory for each run; checkpoints lie in its checkpoints/"
    ),
    "run_name exp_name experiment_name job_name": "write --run-dir runs/{value}",
    "resume_from_checkpoint resume_from load load_checkpoint_path resume_ckpt init_from load_dir ckpt": (
        "write --run-dir DIR --resume, with the directory of the run"
    ),
    "auto_resume auto_resume_from_checkpoints": "write --run-dir DIR --resume auto",
    "overwrite_output_dir": "a run is never overwritten: name another --run-dir",
    "model_name_or_path base_model model_id pretrained_model_name_or_path model_path hf_path pretrained": (
        "write --model NAME, such as gpt2 or llama3-8b; weights are drawn anew"
    ),
    "config_file config_name config_path yaml": (
        "write --config FILE.json, the config.json of a run"
    ),
    "model_type architecture": "write --model NAME, or --set model.family=gpt2 or llama",
    "dataset dataset_name dataset_path datasets hf_dataset": (
        "write --data PATH...: text, JSONL, Parquet or token files, or `stdlib`; data sets by name"
        " are not downloaded"
    ),
    "data_path data_dir train_data_path train_data data_prefix dataset_dir corpus input_file": (
        "write --data {value}, files or globs"
    ),
    "validation_file valid_data_path eval_data val_file eval_dataset validation_data": (
        "leave it out: a share of the documents of --data is held out, --set"
        " data.eval_fraction=0.01"
    ),
    "validation_split_percentage": _percent,
    "split val_ratio val_split validation_split valid_split": (
        "write --set data.eval_fraction=0.01, a share of the documents"
    ),
    "tokenizer_name tokenizer_name_or_path tokenizer_model tokenizer_type vocab_file merge_file": (
        "write --tokenizer PATH of a tokenizer.json, or `bytes`; none is downloaded"
    ),
    "num_workers dataloader_num_workers preprocessing_num_workers": (
        "leave it out: loading needs no number of workers"
    ),
    "shuffle data_seed": "leave it out: the order of the data follows from --seed",
    "packing sample_packing eval_sample_packing pad_to_sequence_len pad_to_max_length group_by_length length_column_name": (
        "leave it out: documents are always packed; --set data.respect_documents keeps them apart"
    ),
    _DEVICES: (
        "leave it out: all devices are used (CUDA_VISIBLE_DEVICES hides some; --cpu-devices {value}"
        " makes virtual ones; the planner takes a cluster such as h100:{value})"
    ),
    "world_size nnodes num_nodes num_machines nodes": (
        "leave it out where a launcher starts the processes, or write --coordinator HOST:PORT"
        " --num-processes {value} --process-id I"
    ),
    "master_addr main_process_ip rdzv_endpoint coordinator_address": _coordinator,
    "master_port main_process_port": (
        "write --coordinator HOST:{value} --num-processes N --process-id I, or let a launcher"
        " say so"
    ),
    "local_rank rank node_rank machine_rank process_index": _rank,
    "fsdp full_shard use_fsdp fully_shard": "write --mesh fsdp=N --zero 3, or --mesh auto",
    "use_distributed_optimizer distributed_optimizer": "write --mesh fsdp=N --zero 1",
    "deepspeed deepspeed_config": (
        "not supported; ZeRO is --mesh fsdp=N --zero 1, 2 or 3, offload --set"
        " parallel.offload=optimizer"
    ),
    "accelerate_config megatron_config": (
        "not supported; write --mesh, or leave the layout to --mesh auto"
    ),
    "fsdp_config fsdp_transformer_layer_cls_to_wrap": (
        "leave it out: layers are gathered one by one"
    ),
    "parallelism strategy": (
        "write --mesh data=2,fsdp=4, sizes of data, fsdp, tensor and pipe, or leave it to --mesh"
        " auto"
    ),
    "pipeline_schedule pipeline_parallel_schedule pp_schedule pp_engine": (
        "write --schedule gpipe, 1f1b or interleaved"
    ),
    "offload cpu_offload offload_optimizer offload_activations optimizer_cpu_offload offload_param": (
        "write --set parallel.offload=optimizer, activations or all"
    ),
    "gradient_checkpointing recompute recompute_granularity recompute_activations activation_checkpointing activation_checkpoint checkpoint_activations remat_policy ac_mode": (
        _recomputing
    ),
    "attn_implementation attn_impl flash_attention flash_attn use_flash_attn use_flash_attention flash_attention_2 attention attention_backend sdp": (
        "leave it out: on GPUs cuDNN's attention is used in bf16 and f16; --set"
        " parallel.attention=xla or cudnn fixes it"
    ),
    "compile torch_compile jit use_compile": "leave it out: every step is compiled",
    "wandb use_wandb project wandb_project wandb_entity wandb_run_name wandb_name wandb_mode wandb_log mlflow comet clearml neptune aim trackio swanlab use_mlflow": (
        "not supported; every step is in metrics.jsonl of the run directory, and --set"
        " log.tensorboard=true writes for TensorBoard"
    ),
    "report_to log_with logger tracker": _tracker,
    "tensorboard use_tensorboard enable_tensorboard tensorboard_dir": (
        "write --set log.tensorboard=true; it lies in the run directory"
    ),
    "device": "leave it out, or write --cpu-devices N for a CPU",
    "attention_dropout hidden_dropout attn_pdrop resid_pdrop embd_pdrop": (
        "write --set model.dropout={value}, which is on embeddings, attention weights and residual"
        " branches"
    ),
    "untie_embeddings_and_output_weights": "write --set model.tied=false",
    "eps": "write --set optimizer.epsilon={value}, or --set model.norm_epsilon={value}",
    "hidden_dim": (
        "write --set model.embed_dim={value} for the width of the model, or --set"
        " model.mlp_dim={value} for that of the feed-forward"
    ),
    "rope_scaling_factor": "write --set model.rope_scaling.factor={value}",
    "lora lora_r lora_rank peft": "not supported: all weights are trained",
    "loss_scale initial_loss_scale": "write --set precision.loss_scale={value}",
    "loss_scale_window": "write --set precision.loss_scale_growth_steps={value}",
    "hysteresis": "write --set precision.loss_scale_hysteresis={value}",
    "distributed_backend ddp_backend backend process_group_backend dist_backend": (
        "leave it out: JAX chooses how devices talk, NCCL between NVIDIA GPUs"
    ),
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers overlap_grad_reduce overlap_param_gather overlap_comm contiguous_gradients allgather_bucket_size reduce_bucket_size reduce_scatter allgather_partitions tp_comm_overlap defer_embedding_wgrad_compute": (
        "leave it out: XLA orders and overlaps what devices send"
    ),
    "ddp_timeout distributed_timeout_minutes timeout init_timeout_seconds": (
        "leave it out, or write --set faults.connect_s=N, seconds that processes wait for one"
        " another at the start"
    ),
    "save_strategy always_save_checkpoint enable_checkpoint enable_checkpointing checkpointing checkpoint.enable": (
        "leave it out, or write --checkpoint-every N: steps between saves"
    ),
    "save_only_model save_safetensors save_on_each_node no_save_optim no_load_optim no_load_rng no_save_rng async_save async_checkpointing async_mode saves_per_epoch load_best_model_at_end metric_for_best_model greater_is_better": (
        "leave it out: every checkpoint is the whole state, saved in the background each"
        " --checkpoint-every N steps"
    ),
    "evaluation_strategy eval_strategy do_eval eval_on_start eval_at_start evals_per_epoch check_val_every_n_epoch num_sanity_val_steps skip_eval": (
        "leave it out, or write --eval-every N: steps between held-out losses"
    ),
    "limit_val_batches limit_eval_batches eval_max_batches": (
        "write --set evaluation.examples=N, counted in examples rather than batches"
    ),
    "logging_strategy logging_first_step steps_per_print log_freq_steps": (
        "leave it out, or write --set log.every=N: steps between lines"
    ),
    "max_length model_max_length": (
        "write --seq-len {value} for the tokens of an example, or --set model.max_length={value}"
        " for positions of the model"
    ),
    "warmup_epochs num_warmup_epochs lr_warmup_samples": (
        "write --set optimizer.warmup_steps=N, a number of steps"
    ),
    "do_train do_predict": "leave it out: scripts/train.py trains",
    "eval_only test_only": "not supported: scripts/train.py trains",
    "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo": (
        "not supported: nothing is sent anywhere"
    ),
    "auto_find_batch_size": "leave it out: --global-batch is kept, and the planner finds what fits",
    "rampup_batch_size": "write --phases STEP:BATCH,..., the batches after a step",
    "fp16_opt_level half_precision_backend fp16_backend amp_level": (
        "leave it out: --precision says it"
    ),
    "enable_tf32 allow_tf32 tf32": (
        "leave it out; JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32 in the environment sets how"
        " float32 matrices are multiplied"
    ),
    "full_determinism deterministic deterministic_mode benchmark cudnn_benchmark": (
        "leave it out: weights and data follow from --seed; on GPUs, xla_gpu_deterministic_ops in"
        " XLA_FLAGS"
    ),
    "disable_tqdm enable_progress_bar progress_bar": "write --progress auto, rich, plain or none",
    "enable_model_summary model_summary plot_loss log_throughput timing_log_level wall_clock_breakdown": (
        "leave it out: what there is, is shown and lies in metrics.jsonl"
    ),
    "remove_unused_columns label_names dataloader_pin_memory dataloader_drop_last dataloader_persistent_workers dataloader_prefetch_factor prefetch_factor pin_memory drop_last overwrite_cache preprocessing_batch_size": (
        "leave it out: there is nothing to set about loading"
    ),
    "label_smoothing label_smoothing_factor neftune_noise_alpha noisy_embedding_alpha z_loss_multiplier": (
        "not supported: the loss is the cross-entropy of the next token; leave it out"
    ),
    "torch_empty_cache_steps empty_cache empty_unused_memory_level manual_gc manual_gc_interval gc_freq": (
        "leave it out: XLA plans memory"
    ),
    "exit_interval exit_duration_in_mins max_time train_time": (
        "leave it out: SIGTERM saves and stops a run, and --run-dir DIR --resume goes on"
    ),
    "max_samples max_train_samples limit_train_batches max_steps_per_epoch fast_dev_run overfit_batches": (
        "write --steps N: a run is as long as its steps"
    ),
    "val_set_size val_size eval_size test_size": (
        "write --set data.eval_fraction={value}, a share of the documents"
    ),
    "position_embedding_type swiglu normalization group_query_attention disable_bias_linear add_bias_linear activation_function hidden_act bias use_bias qk_layernorm activations mlp_activations": (
        "leave it out: --model, or --set model.family=gpt2 or llama, decides it"
    ),
    "make_vocab_size_divisible_by pad_vocab_size_to_multiple_of padded_vocab_size": (
        "leave it out: rows of the vocabulary are padded as the mesh needs it"
    ),
    "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank pipeline_parallel_layers_per_stage": (
        "write --schedule interleaved --set parallel.repeats=N: visits to a device"
    ),
    "transformer_impl use_mcore_models attention_softmax_in_fp32 scan_layers fused_ops use_liger_kernel liger_kernel use_fused_rmsnorm bias_gelu_fusion masked_softmax_fusion": (
        "leave it out: XLA fuses, and there is one implementation"
    ),
    "recompute_method recompute_num_layers selective_ac_option": (
        "write --remat selective or full; it holds for all layers"
    ),
    "quantization load_in_8bit load_in_4bit quantization_bit fp8 float8 use_fp8 quantize": (
        "not supported: --precision is bf16, f16 or f32"
    ),
    "adapter lora_alpha lora_dropout lora_target lora_target_modules finetuning_type qlora": (
        "not supported: all weights are trained"
    ),
    "stage train_on_inputs chat_template template completion_only_loss": (
        "not supported: training is on plain text, and all its tokens count"
    ),
    "max_tokens_per_microbatch loss_chunk_size": "leave it out: --microbatches divides a step",
    "betas adam_betas": "write --set optimizer.beta1=0.9 --set optimizer.beta2=0.95",
    "rdzv_backend rdzv_id standalone max_restarts gpu_ids main_training_function": (
        "leave it out: it is of the launcher, which torchrun or scripts/launch.py is"
    ),
    "use_cpu no_cuda cpu": "write --cpu-devices N, or set JAX_PLATFORMS=cpu in the environment",
    "save_top_k early_stopping patience early_stopping_patience": (
        "not supported: a run ends at --steps, and --set checkpoint.keep=N keeps the newest"
        " checkpoints"
    ),
    "steps_per_epoch": "leave it out: a run is counted in --steps",
    "streaming cache_dir dataset_cache_dir trust_remote_code": (
        "leave it out: nothing is downloaded, and --data names files"
    ),
    "use_reentrant gradient_checkpointing_kwargs": (
        "leave it out: --remat none, selective, dots or full says it"
    ),
    "use_cache": "leave it out: it is of generation",
    "rope_scaling": "write --set model.rope_scaling.factor=N and others of model.rope_scaling.*",
    "nsys_profile profile use_profiler enable_profiling enable_profiler profile_steps": (
        "not supported by a run; leave it out"
    ),
    "decay_lr": (
        "leave it out, or write --set optimizer.schedule=constant for a rate that does not decay"
    ),
    "lr_scheduler_kwargs scheduler_kwargs": (
        "write --set optimizer.decay_fraction and others of optimizer.*"
    ),
    "accelerator hardware platform": (
        "leave it out: JAX takes what there is; --cpu-devices N makes virtual devices of a CPU"
    ),
    "logger_name loggers": "leave it out: metrics.jsonl in the run directory has every step",
    "callbacks plugins profiler": "not supported; leave it out",
    "default_root_dir": "write --run-dir {value}, a directory for each run",
    "gradient_clip_algorithm": (
        "leave it out: gradients are clipped by their norm, --set optimizer.clip_norm"
    ),
    "dataset_type": "leave it out: the ending of a file of --data says it",
    "checkpoint.interval": "write --checkpoint-every {value}",
    "checkpoint.folder": "write --run-dir DIR: checkpoints lie in its checkpoints/",
    "eval.interval": "write --eval-every {value}",
    "model.flavor": "write --model NAME, such as llama3-8b",
    "verbose quiet log_level verbosity debug": "write --progress auto, rich, plain or none",
}
ADVICE: Mapping[str, Advice] = {
    each: advice for words, advice in _ADVICE.items() for each in words.split()
}
"""Word to what to write instead."""
