"""Directories of published models that are whole, and those of which the files disagree."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_models import (
    ENCODERS,
    MODELS,
    libraries,
    model_of,
    state_dict_of,
    write,
    write_index,
)

from optimus_jax.errors import CheckpointError, ConfigError
from optimus_jax.models.families import check_family
from optimus_jax.models.huggingface import config_from_huggingface
from optimus_jax.models.huggingface_formats import HEAD, family_format
from optimus_jax.models.huggingface_keys import KEY_TYPES
from optimus_jax.models.huggingface_tensors import tensor_shapes
from optimus_jax.weights.directory import open_model, read_config, read_tensors

INDEX = "pytorch_model.bin.index.json"


def save(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write tensors as one safetensors file."""
    libraries()
    from safetensors.numpy import save_file

    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "renamed", "more"),
    [
        ("gpt2", lambda name: name.removeprefix("transformer."), {"h.0.attn.bias": (1, 1, 16, 16)}),
        ("gpt2", str, {"transformer.h.1.attn.masked_bias": (1,), HEAD: (37, 24)}),
        ("llama", str, {"model.layers.0.self_attn.rotary_emb.inv_freq": (3,)}),
        ("opt", lambda name: name.removeprefix("model."), {}),
        ("opt", lambda name: name.removeprefix("model.decoder."), {}),
    ],
)
def test_prefixes_buffers_and_tied_heads_may_differ(family, renamed, more, tmp_path):
    model_of(family).config.save_pretrained(tmp_path)
    tensors = {renamed(name): tensor for name, tensor in state_dict_of(family).items()}
    tensors |= {name: np.ones(shape, np.int8) for name, shape in more.items() if name != HEAD}
    if HEAD in more:
        tensors[HEAD] = tensors["transformer.wte.weight"]
    elif family == "opt":
        tensors.pop(HEAD)
    save(tmp_path, tensors)
    model = open_model(tmp_path)
    assert model.tensors.keys() - {HEAD} == tensor_shapes(model.config).keys() - {HEAD}
    model.check_tied_head()


@pytest.mark.parametrize("family", [one for one in ENCODERS if family_format(one).older_endings])
def test_norms_of_older_files_have_other_names(family, tmp_path):
    """As those of bert-base-uncased: gamma and beta."""
    own, older = state_dict_of(family), {}
    for name, tensor in own.items():
        for ending, other in (("weight", "gamma"), ("bias", "beta")):
            name = name.replace(f"LayerNorm.{ending}", f"LayerNorm.{other}")
        older[name] = tensor
    assert len(own.keys() - older.keys()) >= 10
    opened = []
    for tensors, directory in ((own, tmp_path / "own"), (older, tmp_path / "older")):
        directory.mkdir()
        model_of(family).config.save_pretrained(directory)
        save(directory, tensors)
        model = open_model(directory)
        opened.append({name: np.asarray(each) for name, each in model.tensors.items()})
    assert opened[0].keys() == opened[1].keys()
    for name, tensor in opened[0].items():
        np.testing.assert_array_equal(tensor, opened[1][name])


def test_a_body_of_images_alone_is_read(tmp_path):
    """As vit-base-patch16-224-in21k: no prefix, a pooler, neither head nor hidden patch."""
    _, transformers = libraries()
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=20,
        image_size=8,
        patch_size=2,
    )
    config.architectures = ["ViTModel"]
    config.save_pretrained(tmp_path)
    prefix, model = "vit.", transformers.ViTForMaskedImageModeling
    shapes = {
        name: shape
        for name, shape in file_shapes_of(model(config), tmp_path / "whole").items()
        if name.startswith(prefix) and "mask_token" not in name
    }
    shapes |= {"vit.pooler.dense.weight": (16, 16), "vit.pooler.dense.bias": (16,)}
    tensors = {name.removeprefix(prefix): np.ones(shape) for name, shape in shapes.items()}
    save(tmp_path, {name: tensor.astype(np.float32) for name, tensor in tensors.items()})
    found = open_model(tmp_path, needs_head=False)
    assert found.config.reads == "images"
    assert found.tensors.keys() == tensors.keys() - {"pooler.dense.weight", "pooler.dense.bias"}
    with pytest.raises(CheckpointError, match=r"missing: decoder\.0\.bias"):
        open_model(tmp_path)


def file_shapes_of(model: Any, directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in files, whose names may differ from those in memory."""
    model.save_pretrained(directory)
    return {name: tuple(each.shape) for name, each in read_tensors(directory).items()}


def test_a_head_that_is_not_the_embedding_is_refused(tmp_path):
    model_of("gpt2").config.save_pretrained(tmp_path)
    tensors = {name: tensor.copy() for name, tensor in state_dict_of("gpt2").items()}
    tensors[HEAD][36, 0] += 1
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"tied, but lm_head.weight is not the embedding"):
        open_model(tmp_path).check_tied_head()
    for name in (HEAD, "transformer.wte.weight"):
        tensors[name][36, 0] = np.nan  # which is another fault
    save(tmp_path, tensors)
    open_model(tmp_path).check_tied_head()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "missing: norm.weight; unknown: none"),
        ({HEAD: None}, "missing: lm_head.weight; unknown: none"),
        ({"score.weight": np.zeros((2, 24), np.float32)}, "missing: none; unknown: score.weight"),
        ({"\x1b[31m\n": np.zeros(2, np.float32)}, r"unknown: \\x1b\[31m\\n"),
        ({"norm.weight": np.zeros(24, np.float32)}, "twice: norm.weight"),
        ({"model.norm.weight": np.zeros(23, np.float32)}, r"shape \(23,\), wanted \(24,\)"),
        ({"model.norm.weight": np.zeros((24, 1), np.float32)}, r"shape \(24, 1\), wanted \(24,\)"),
        ({"model.norm.weight": np.zeros(24, np.int8)}, "dtype int8"),
        (
            {
                HEAD: np.zeros((36, 24), np.float16),
                "model.norm.weight": np.zeros(24, np.uint8),
                "model.layers.1.mlp.up_proj.weight": None,
                **{f"model.layers.{layer}.x": np.zeros(1) for layer in range(9)},
            },
            r"missing: layers.1.mlp.up_proj.weight; unknown: layers.0.x, .* and 4 more;"
            r" lm_head.weight has shape \(36, 24\), wanted \(37, 24\), norm.weight has dtype uint8",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused(change, message, tmp_path):
    model_of("qwen2").config.save_pretrained(tmp_path)
    tensors = state_dict_of("qwen2") | change
    save(tmp_path, {name: each for name, each in tensors.items() if each is not None})
    with pytest.raises(CheckpointError, match=message):
        open_model(tmp_path)


def test_dtypes_of_floats_may_be_mixed(tmp_path):
    model_of("qwen2").config.save_pretrained(tmp_path)
    save(tmp_path, state_dict_of("qwen2") | {"model.norm.weight": np.zeros(24, np.float64)})
    assert open_model(tmp_path).tensors["norm.weight"].dtype == np.float64


def change_index(change: Callable[[dict], Any]) -> Callable[[Path], object]:
    """Change which file has which tensor, in the index of a directory."""

    def changed(directory: Path) -> None:
        shard_of = json.loads((directory / INDEX).read_text())["weight_map"]
        shard_of = change(shard_of) or shard_of
        write_index(directory / INDEX, shard_of)

    return changed


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Put something else in place of a file."""

    def replace(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return replace


NORM, FIRST = "model.norm.weight", "pytorch_model-0.bin"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda directory: (directory / FIRST).unlink(), f"1 of 6: {FIRST}"),
        (change_index(lambda files: files.update({NORM: FIRST})), "does not say so: model.norm"),
        (change_index(lambda files: files.pop(NORM) and None), "does not say so: model.norm"),
        (change_index(lambda files: files.update({"x": FIRST})), "not in any of its files: x;"),
        (change_index(lambda files: files.update({NORM: "gone.bin"})), "1 of 7: gone.bin"),
        (change_index(lambda files: files.update({NORM: "x" * 5000})), "1 of 7: xxx"),
        (change_index(lambda files: files.update({NORM: "\ud800"})), r"1 of 7: \\ud800"),
        (change_index(lambda files: files.update({NORM: "../a.bin"})), "outside its directory"),
        (change_index(lambda files: files.update({NORM: "/etc/passwd"})), "outside its directory"),
        (change_index(lambda files: files.update({NORM: ".."})), "outside its directory"),
        (change_index(lambda files: files.update({NORM: ""})), "outside its directory"),
        (change_index(lambda files: files.update({NORM: "a\0"})), "outside its directory"),
        (change_index(lambda files: files.update({NORM: 1})), "not an object of file names"),
        (change_index(lambda files: [FIRST]), "not an object of file names"),
        (lambda directory: (directory / INDEX).write_text("[]"), "not an object of file names"),
        (lambda directory: (directory / INDEX).write_text('{"a'), "it is not JSON"),
        (lambda directory: (directory / INDEX).write_text('{"a": 1, "a": 2}'), "'a' appears twice"),
        (lambda directory: (directory / INDEX).write_text("[" * 10**6), "it is not JSON"),
        (replaced(FIRST, os.mkfifo), "not a regular file"),
        (replaced(FIRST, os.mkdir), "not a regular file"),
        (replaced(FIRST, lambda path: path.symlink_to("/dev/zero")), "not a regular file"),
        (replaced(FIRST, lambda path: path.symlink_to("nowhere")), f"1 of 6: {FIRST}"),
        (replaced(FIRST, lambda path: path.symlink_to(path)), f"1 of 6: {FIRST}"),
        (
            replaced(FIRST, lambda path: path.write_text("version https://git-lfs.github.com/x")),
            "git lfs pull",
        ),
        (
            replaced("pytorch_model-5.bin", lambda path: path.symlink_to(FIRST)),
            "in files where it does not say so",
        ),
    ],
)
def test_an_index_that_lies_is_refused(damage, message, tmp_path):
    write("qwen2", "sharded bin", "float32", tmp_path)
    assert len(open_model(tmp_path).tensors) == 27
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_model(tmp_path)
    assert "do:" in str(caught.value)


def test_files_may_be_links_as_in_a_cache_of_downloads(tmp_path):
    write("qwen2", "sharded bin", "float32", tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    assert open_model(tmp_path / "snapshot").tensors


def test_safetensors_are_preferred(tmp_path):
    write("qwen2", "bin", "float16", tmp_path)
    assert open_model(tmp_path).tensors["norm.weight"].dtype == np.float16
    write("qwen2", "sharded safetensors", "float32", tmp_path)
    assert open_model(tmp_path).tensors["norm.weight"].dtype == np.float32


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_directory_without_weights_or_config_is_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights that can be read"):
        read_tensors(tmp_path / name)
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "a list"),
        ("null", "a NoneType"),
        ('"gpt2"', "a str"),
        ("{}", "of which family"),
        ('{"model_type": 5}', "of which family"),
        ('{"model_type": ["gpt2"]}', "of which family"),
        ('{"model_type": "mamba"}', "not among ours"),
        ('{"model_type": "%s"}' % ("x" * 10_000), "not among ours"),
        ('{"model_type": "gpt2", "n_embd": NaN}', "NaN is not a number"),
        ('{"model_type": "gpt2", "n_embd": 1e999}', "too large"),
        ('{"model_type": "gpt2", "n_embd": %s}' % ("9" * 5000), "cannot be read"),
        ('{"model_type": "gpt2", "model_type": "opt"}', "twice"),
        ('{"a": ' * 100 + "1" + "}" * 100, "nested deeper"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "more than 1,048,576"),
        ('{"model_type": "gpt2"}', "lacks sizes"),
    ],
)
def test_a_malformed_config_is_refused(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(tmp_path)
    assert "do:" in str(caught.value)
    assert len(str(caught.value)) < 1000


def config_of(family: str) -> dict[str, Any]:
    """The config.json of a tiny model, as transformers writes it, with a class that exists."""
    ending = "ForMaskedLM" if family in ENCODERS else "ForCausalLM"
    return model_of(family).config.to_dict() | {"architectures": [f"A{ending}"]}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt2", {"vocab_size": "37"}, "vocab_size='37', wanted a whole number"),
        ("gpt2", {"n_layer": 2.0}, "n_layer=2.0, wanted a whole number"),
        ("gpt2", {"n_layer": True}, "n_layer=True, wanted a whole number"),
        ("gpt2", {"n_layer": -1}, "n_layer=-1, wanted a number from 0"),
        ("gpt2", {"n_head": 0}, "n_head=0, wanted a number above 0"),
        ("gpt2", {"n_layer": 10**9}, "n_layer=1000000000, wanted a number up to 10,000"),
        ("gpt2", {"n_embd": 10**30}, "wanted a number from 0 to 2,147,483,647"),
        ("gpt2", {"n_embd": 2**30, "n_head": 1, "n_inner": None}, "too large"),
        ("gpt2", {"tie_word_embeddings": "false"}, "'false', wanted true or false"),
        ("gpt2", {"layer_norm_epsilon": "1e-5"}, "'1e-5', wanted a number"),
        ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "another task"),
        ("gpt2", {"architectures": ["GPT2ForTokenClassification"]}, "another task"),
        ("gpt2", {"architectures": "GPT2Model"}, "architectures='GPT2Model', wanted a list"),
        ("gpt2", {"architectures": [None]}, "wanted a list of texts"),
        ("llama", {"num_key_value_heads": 3}, "multiple"),
        ("llama", {"head_dim": 5}, "odd"),
        ("llama", {"attention_bias": "no"}, "attention_bias='no'"),
        ("llama", {"rope_parameters": []}, "wanted an object"),
        ("llama", {"rope_parameters": {"rope_theta": "1e4"}}, "rope_parameters.rope_theta='1e4'"),
        ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "rope_theta=-1.0"),
        ("llama", {"rope_parameters": {"a": {"b": {}}}}, "rope_parameters.a.b={}"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor=None"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "positive"),
        ("qwen2", {"layer_types": ["full_attention"]}, "number of layer_types=1, wanted 2"),
        ("qwen2", {"layer_types": [["full_attention"], None]}, "wanted a list of texts"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window=1"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "above 0"),
        ("gemma2", {"query_pre_attn_scalar": -4}, "from 0"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "above 0"),
        ("gpt_neo", {"attention_types": [[["global"], 10**12]]}, "=1000000000000, wanted 2"),
        ("gpt_neo", {"attention_types": [["global", 2]]}, "a list of"),
        ("gpt_neo", {"attention_types": 5}, "wanted a list"),
        ("gptj", {"rotary_dim": 7}, "in pairs|pairs of"),
        ("gptj", {"rotary_dim": None}, "rotary_dim=None"),
        ("opt", {"word_embed_proj_dim": -1}, "word_embed_proj_dim=-1"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(family, change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(family), default=str))
    assert read_config(tmp_path).family == family
    (tmp_path / "config.json").write_text(json.dumps(config_of(family) | change, default=str))
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


VALUES = ("7", 1.5, -1, 0, True, None, 10**40, 2**31, [], ["a"], {}, {"a": {}}, [[1, 2]])


@pytest.mark.parametrize("family", MODELS)
def test_any_value_of_any_key_is_read_or_refused(family):
    config, errors = config_of(family), []
    for key in config.keys() | KEY_TYPES.keys():
        for value in VALUES:
            try:
                check_family(config_from_huggingface(config | {key: value}))
            except ConfigError as error:
                errors.append(str(error))
    assert len(errors) > 100
    assert all("given:" in error and "do:" in error for error in errors)


@pytest.mark.parametrize("family", MODELS)
def test_a_config_may_leave_out_how_new_weights_are_drawn(family, tmp_path):
    hf_config = config_of(family)
    whole = config_from_huggingface(hf_config)
    for key in ("initializer_range", "init_std"):
        hf_config.pop(key, None)
    assert config_from_huggingface(hf_config) == whole
