"""Directories of tiny models of every family, as transformers and torch write them."""

import copy
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

LLAMA_LIKE = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
BERT_LIKE = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
GPT = {"vocab_size": 37, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT | {"n_inner": 20},
    "gpt_neo": {
        "vocab_size": 37,
        "hidden_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 16,
    },
    "gptj": GPT | {"rotary_dim": 4, "tie_word_embeddings": False},
    "opt": {
        "vocab_size": 37,
        "hidden_size": 24,
        "ffn_dim": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "word_embed_proj_dim": 12,
        "do_layer_norm_before": False,
    },
    "llama": LLAMA_LIKE | {"attention_bias": True, "mlp_bias": True},
    "mistral": LLAMA_LIKE | {"head_dim": 8},
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE | {"head_dim": 8, "tie_word_embeddings": True},
    "olmo2": LLAMA_LIKE,
    "phi3": LLAMA_LIKE | {"pad_token_id": 0},
    "bert": BERT_LIKE,
    "megatron-bert": BERT_LIKE,
    "electra": BERT_LIKE | {"embedding_size": 12},
    "gemma2": LLAMA_LIKE | {"head_dim": 8},
    "gemma3_text": LLAMA_LIKE | {"head_dim": 8, "num_hidden_layers": 6},
}
"""Values of config.json by model_type."""
ENCODERS = ("bert", "megatron-bert", "electra")
WORDS = ["<unk>", "</s>", "the", "cat", "sat", "on", "mat", "and", "dog", "ran"]
"""The vocabulary of `with_tokenizer`."""
TINY_RUN: dict[str, Any] = {
    "global_batch": 8,
    "seq_len": 16,
    "steps": 1,
    "lr": 1e-3,
    "eval_every": 0,
    "progress": "none",
    "data.eval_fraction": 0.0,
}
"""Settings of a run of one step that begins with one of these models."""
SHARD_TENSORS = 5
"""Tensors of each file of a sharded model."""


def libraries() -> tuple[Any, Any]:
    """Torch and transformers, or a skipped test."""
    return tuple(
        pytest.importorskip(
            name, reason=f"the test needs {name}: pip install optimus-jax[huggingface]"
        )
        for name in ("torch", "transformers")
    )


@cache
def model_of(family: str) -> Any:
    """A model of torch, whose parameters all differ."""
    torch, transformers = libraries()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **MODELS[family])
    auto = "AutoModelForMaskedLM" if family in ENCODERS else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config)
    for weight in model.parameters():
        weight.data = torch.randn_like(weight)
    return model


def state_dict_of(family: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The model's tensors in float32, rounded to a dtype."""
    torch, _ = libraries()
    return {
        name: tensor.to(getattr(torch, dtype)).to(torch.float32).numpy()
        for name, tensor in model_of(family).state_dict().items()
    }


def write(family: str, kind: str, dtype: str, directory: Path) -> Path:
    """Write a model's directory.

    Args:
      kind: `safetensors`, `bin` or `legacy bin`, or one of them after `sharded `.
      dtype: name of a dtype of torch.
    """
    torch, _ = libraries()
    model, is_sharded = model_of(family), kind.startswith("sharded ")
    kind = kind.removeprefix("sharded ")
    directory.mkdir(parents=True, exist_ok=True)
    if kind == "safetensors":
        size = "6KB" if is_sharded else "1GB"
        rounded = copy.deepcopy(model).to(getattr(torch, dtype))
        rounded.save_pretrained(directory, max_shard_size=size)
        return directory
    model.config.save_pretrained(directory)
    tensors = {
        name: tensor.to(getattr(torch, dtype)) for name, tensor in model.state_dict().items()
    }
    options = {} if kind == "bin" else {"_use_new_zipfile_serialization": False}
    if not is_sharded:
        torch.save(tensors, directory / "pytorch_model.bin", **options)
        return directory
    names, shard_of = list(tensors), {}
    for start in range(0, len(names), SHARD_TENSORS):
        shard, part = f"pytorch_model-{start}.bin", names[start : start + SHARD_TENSORS]
        torch.save({name: tensors[name] for name in part}, directory / shard, **options)
        shard_of |= dict.fromkeys(part, shard)
    write_index(directory / "pytorch_model.bin.index.json", shard_of)
    return directory


def with_tokenizer(directory: Path) -> Path:
    """Add the files of a tokenizer of WORDS."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = pytest.importorskip("tokenizers")
    whole = tokenizer.Tokenizer(tokenizer.models.WordLevel(vocabulary, unk_token="<unk>"))
    whole.pre_tokenizer = tokenizer.pre_tokenizers.Whitespace()
    whole.add_special_tokens(["</s>"])
    whole.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return directory


def write_index(path: Path, shard_of: Mapping[str, object]) -> None:
    """Write the index of a sharded model."""
    path.write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))


def read_bytes(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Counts the bytes and calls by which files are read from now on."""
    read, count = os.preadv, SimpleNamespace(bytes=0, calls=0)

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        done = read(descriptor, buffers, offset)
        count.bytes += done
        count.calls += 1
        return done

    monkeypatch.setattr(os, "preadv", counted)
    return count
