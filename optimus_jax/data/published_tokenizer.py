"""The files with which transformers' AutoTokenizer makes a run's tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimus_jax.data.eos import CONFIG
from optimus_jax.data.recordings import NO_TIMESTAMPS
from optimus_jax.data.tokenizers import FILE, ByteTokenizer, Tokenizer
from optimus_jax.system.json_input import JSONInputError, parse_json

END_OF_BYTES = "<|endoftext|>"
"""How the token that ends a document of bytes is called; such a text stays bytes."""
CHAT_TEMPLATE = "chat_template.jinja"
ANY_CLASS, OF_WHISPER = "PreTrainedTokenizerFast", "WhisperTokenizer"
"""Classes of transformers. The latter makes a byte-level BPE of its own of the vocabulary and the
merges; its pipeline for speech needs it."""


def published_files(
    tokenizer: Tokenizer, own: Path, max_length: int, *, of_sound: bool = False
) -> dict[str, bytes]:
    """Content of the files, by name.

    A tokenizer of bytes becomes a tokenizer.json without merges, whose ids are the same.

    Args:
      own: directory with the files that the run has kept, if any: their special tokens and chat
        template are passed on.
      max_length: positions of the model, in tokens.
      of_sound: whether the model writes down recordings.
    """
    if isinstance(tokenizer, ByteTokenizer):
        content, special = _of_bytes(tokenizer), {"eos_token": END_OF_BYTES}
        # without it a text with the token's name would end the document
        special |= {"split_special_tokens": True}
    else:
        content = tokenizer.files[FILE]
        special = json.loads(tokenizer.files[CONFIG]) | _config_in(own)
    config = {
        "pad_token": special["eos_token"],
        **special,
        "tokenizer_class": ANY_CLASS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if of_sound and _is_byte_level(content):
        content, end = _with_no_timestamps(content), special["eos_token"]
        config |= {"tokenizer_class": OF_WHISPER, "bos_token": end, "unk_token": end}
    files = {FILE: content, CONFIG: _json(config)}
    template = own / CHAT_TEMPLATE
    return files | ({CHAT_TEMPLATE: template.read_bytes()} if template.is_file() else {})


def _is_byte_level(content: bytes) -> bool:
    """Whether a tokenizer.json is what OF_WHISPER makes of its vocabulary and merges."""
    whole = json.loads(content)
    model, before, after = (whole.get(part) or {} for part in ("model", "pre_tokenizer", "decoder"))
    return (
        [each.get("type") for each in (model, before, after)] == ["BPE", "ByteLevel", "ByteLevel"]
        and not whole.get("normalizer")
        and not (model.get("merges") and before.get("use_regex") is False)
    )


def _with_no_timestamps(content: bytes) -> bytes:
    """A tokenizer.json that has the token NO_TIMESTAMPS: all that are after it are timestamps to
    the pipeline. Where it is missing it becomes the last one.
    """
    whole = json.loads(content)
    added = whole.get("added_tokens") or []
    vocab = {token["content"]: token["id"] for token in added} | whole["model"]["vocab"]
    if NO_TIMESTAMPS in vocab:
        return content
    token = {
        "id": max(vocab.values()) + 1,
        "content": NO_TIMESTAMPS,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return _json(whole | {"added_tokens": [*added, token]})


def adds_tokens(tokenizer: Tokenizer) -> bool:
    """Whether transformers adds special tokens to texts by default, which the run did not: its
    tokenizer.json says so.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return False
    import tokenizers

    whole = tokenizers.Tokenizer.from_buffer(tokenizer.files[FILE])
    return whole.num_special_tokens_to_add(is_pair=False) > 0


def _config_in(own: Path) -> dict[str, Any]:
    """The content of the tokenizer_config.json that the run has kept; empty if there is none."""
    try:
        value = parse_json((own / CONFIG).read_bytes(), finite=False)
    except (OSError, JSONInputError):
        return {}
    return value if isinstance(value, dict) else {}


def _of_bytes(tokenizer: ByteTokenizer) -> bytes:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    end = {
        "id": tokenizer.eos,
        "content": END_OF_BYTES,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": _characters(),
        "merges": [],
    }
    return _json(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
    )


def _characters() -> Mapping[str, int]:
    """The character by which ByteLevel writes each byte: itself if it can be printed, else one of
    those from 256 on (https://github.com/openai/gpt-2, encoder.py).
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printed else next(others)): byte for byte in range(256)}


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
