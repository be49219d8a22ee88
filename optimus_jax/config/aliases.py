"""Names of settings in other frameworks that are accepted: Hugging Face's Trainer and Accelerate,
Megatron-LM, DeepSpeed, MaxText, torchtitan, NeMo, Lightning, nanotron, nanoGPT, nanochat, Levanter,
axolotl, LLaMA-Factory, LitGPT and PEFT.

A name in ALIASES means the same as one of our settings, in the same unit, and is translated. Names
that mean something else, or count differently, get advice instead (advice.py). No name is in both
tables or is one of our settings; a test checks this.
"""

from collections.abc import Callable, Mapping
from typing import Any

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
    "data.chat_template": "chat_template_path",
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
    "optimizer.layer_lr_decay": (
        "layer_lr_decay layer_decay layerwise_lr_decay layerwise_learning_rate_decay llrd"
    ),
    "optimizer.clip_norm": (
        "clip_norm max_grad_norm clip_grad grad_clip gradient_clipping gradient_clip_val"
        " gradient_clipping_threshold max_norm clip_grad_norm gradient_max_norm clip_gradients"
    ),
    "evaluation.data": (
        "validation_file valid_data_path val_file eval_dataset validation_data"
        " validation_dataset valid_file dev_file eval_file"
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
    "adapters_from": "lora_model_dir adapter_name_or_path adapter_path",
    "model.tuning.method": "adapter tuning.method",
    "model.tuning.rank": "lora_r lora_rank lora.r lora.rank tuning.rank",
    "model.tuning.alpha": "lora_alpha lora.alpha tuning.alpha",
    "model.tuning.dropout": "lora_dropout lora.dropout tuning.dropout",
    "model.tuning.targets": "tuning.targets",
    "model.tuning.freeze": "tuning.freeze",
    "model.tuning.freeze_layers": "freeze_layers num_frozen_layers tuning.freeze_layers",
    "model.tied": (
        "tie_word_embeddings tie_embeddings weight_tying logits_via_embedding tied_embeddings"
    ),
}
WORDS_OF: Mapping[str, list[str]] = {target: words.split() for target, words in _ALIASES.items()}
"""Setting, or one of PARAMETERS -> its names elsewhere."""
ALIASES: Mapping[str, str] = {word: target for target, words in WORDS_OF.items() for word in words}
"""Word to the dotted name of a setting, or one of PARAMETERS."""

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
RENAMED = {"distributed.engine": "distributed.launcher"}
"""Earlier name of a setting -> its present name. Both are read."""
SPELLED_ANEW: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "log.tensorboard": ("log.trackers", lambda is_on: ["tensorboard"] if is_on else []),
}
"""Setting of earlier versions -> its present name, and its value there of an earlier value. Only
configs of earlier runs have them."""
_ONE_VALUE = (
    "leave it out: a switch is made if it is worth more than it costs, and controller.budget_share"
    " limits what switches may lose (docs/control.md)"
)
RETIRED = {
    "controller.min_gain": _ONE_VALUE,
    "controller.min_probability": _ONE_VALUE,
    "controller.gain_over_cost": _ONE_VALUE,
}
"""Setting of earlier versions -> what to do instead. Configs of earlier runs may have them; they
are ignored there."""
OUR_SECTIONS = {target.partition(".")[0] for target in _ALIASES if "." in target}
"""Sections of this project: their names are never aliases."""


def alias_of(name: str) -> str | None:
    """The setting, or parameter, that a word of another framework means; None: unknown or
    ambiguous.

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
    """The setting that the last part of a dotted name would mean without its section; None: it is
    in no table.
    """
    section, _, leaf = word(name).rpartition(".")
    # names of training mean something else in these sections
    if not section or any(part.startswith(("eval", "val", "test")) for part in section.split(".")):
        return None
    return ALIASES.get(leaf) or _OWN.get(leaf)
