"""Exported models: transformers and we read what the run has, whatever mesh it was trained on."""

import errno
import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_RELATIVE, assert_close, host_leaves
from plans import build, case, in_order, model_for, random_state
from published_models import MODELS, libraries, model_of, state_dict_of
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.checkpoint import checkpoints as checkpoints_module
from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.checkpoint.slices import StoredLeaf
from optimus_jax.config import CheckpointConfig, Config, ModelConfig, Tuning
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import CheckpointError, ConfigError, OptimusError
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.models.huggingface import config_from_huggingface, from_huggingface
from optimus_jax.models.huggingface_tensors import leaf_sources
from optimus_jax.models.merging import merged
from optimus_jax.models.shapes import Params, model_shapes
from optimus_jax.run import exported_weights
from optimus_jax.run.export import RunToExport, export
from optimus_jax.run.exported_weights import StoppedError
from optimus_jax.training.state import to_stored
from optimus_jax.weights.directory import open_model

PADDING = 5
"""Rows of the embedding after the vocabulary."""
ONE_DEVICE = case("data=1")
MESHES = [
    case("pipe=2,fsdp=2,tensor=2", schedule="interleaved", microbatches=6, zero=1),
    case("data=2,fsdp=2,tensor=2", zero=3),
    case("fsdp=2,tensor=3", zero=2),
]
"""The first leaves slots without a layer, the last pads the vocabulary to other rows."""
DATA = {"tokenizer": ByteTokenizer.digest, "eos": 256}


def write_run(
    run: Path, config: ModelConfig, params: Params, steps: tuple[int, ...] = (7,)
) -> Path:
    """A run's directory with checkpoints of these parameters alone."""
    run.mkdir(parents=True)
    settings = Config(model=config)
    (run / "config.json").write_text(settings.to_json())
    checkpoints = Checkpoints(run / "checkpoints", CheckpointConfig())
    for step in steps:
        checkpoints.save(
            step,
            {"params": jax.tree.map(jnp.asarray, params)},
            {"config": settings.to_json(), "data": DATA},
        )
    checkpoints.close()
    return run


def run_of(family: str, directory: Path) -> tuple[Path, Params, ModelConfig]:
    """A run with a family's tiny model, whose vocabulary is padded."""
    config = config_from_huggingface(model_of(family).config.to_dict())
    params = from_huggingface(state_dict_of(family), config, config.vocab_size + PADDING)
    return write_run(directory / "run", config, params), params, config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_of("qwen3", tmp_path)[0]


@pytest.mark.parametrize("family", MODELS)
def test_transformers_and_we_read_what_the_run_has(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In boxes and files so small that most leaves are several."""
    torch, transformers = libraries()
    monkeypatch.setattr(checkpoints_module, "CHUNK_BYTES", 512)
    monkeypatch.setattr(exported_weights, "BOX_BYTES", 700)
    run, params, config = run_of(family, tmp_path)
    done = optimus_jax.export(run, tmp_path / "out", max_shard_size="6KB")
    assert (done.step, done.dtype, done.directory) == (7, "f32", tmp_path / "out")

    model = open_model(done.directory)
    assert replace(model.config, name="custom") == config
    assert len({tensor.path for tensor in model.tensors.values()}) > 1
    assert ("lm_head.weight" in model.tensors) != config.tied
    leaves = host_leaves(params)
    for path, source in leaf_sources(model_shapes(config, config.vocab_size + PADDING)).items():
        np.testing.assert_array_equal(source.block(model.tensors), leaves[path], err_msg=path)

    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        done.directory, output_loading_info=True
    )
    assert not any(loading.values()), loading
    tokens = torch.arange(12).reshape(2, 6) * 3
    with torch.no_grad():
        found, expected = (each.eval()(tokens).logits for each in (theirs, model_of(family)))
    assert torch.equal(found, expected)
    assert theirs.generation_config.eos_token_id == 256
    assert transformers.AutoTokenizer.from_pretrained(done.directory)("aé")["input_ids"] == [
        *b"a\xc3\xa9"
    ]


@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(method="lora", rank=3, alpha=5.0),
        Tuning(method="lora", rank=2, targets=("value", "up", "down"), base_precision="bf16"),
        Tuning(method="ia3"),
        Tuning(freeze=("attention", "embedding"), base_precision="bf16"),
        Tuning(method="lora", rank=2, base_precision="nf4"),
        Tuning(method="lora", rank=2, targets=("qkvo",), base_precision="int8"),
    ],
    ids=["lora", "some", "ia3", "frozen", "nf4", "int8"],
)
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_adapters_are_merged(
    family: str, tuning: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoints_module, "CHUNK_BYTES", 512)
    monkeypatch.setattr(exported_weights, "BOX_BYTES", 700)
    libraries()
    base = config_from_huggingface(model_of(family).config.to_dict())
    config = replace(base, tuning=tuning)
    rng, shapes = np.random.default_rng(0), model_shapes(config, base.vocab_size)

    def random(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 256, leaf.shape, np.uint8).view(leaf.dtype))
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    params = jax.tree.map(random, shapes.params)
    run = write_run(tmp_path / "run", config, params)
    passed_on, write = [], exported_weights.WeightsExport.write

    def noted(export, *args, advance, **fields):
        write(export, *args, advance=passed_on.append, **fields)
        assert sum(passed_on) == export.num_stored_bytes

    monkeypatch.setattr(exported_weights.WeightsExport, "write", noted)
    done = optimus_jax.export(run, tmp_path / "out", dtype="f32")
    assert passed_on
    tensors = open_model(done.directory).tensors
    expected = host_leaves(merged(params, shapes))
    for path, source in leaf_sources(model_shapes(base, base.vocab_size)).items():
        assert_close(source.block(tensors), expected[path], F32_RELATIVE)


def test_no_more_than_a_box_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The largest tensor has 3.5 KB, and its leaf twice as much."""
    monkeypatch.setattr(checkpoints_module, "CHUNK_BYTES", 512)
    monkeypatch.setattr(exported_weights, "BOX_BYTES", 700)
    run, params, _ = run_of("llama", tmp_path)
    read, sizes = StoredLeaf.read, []

    def measured(leaf: StoredLeaf, box: tuple[slice, ...]) -> np.ndarray:
        values = read(leaf, box)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(StoredLeaf, "read", measured)
    export(run, tmp_path / "out")
    assert max(sizes) <= 700
    assert sum(sizes) == sum(leaf.nbytes for leaf in host_leaves(params).values())


def test_a_run_begins_with_what_was_exported(tmp_path: Path):
    """Its tokens are the bytes of the run before, and its first loss is that of the parameters."""
    settings: dict[str, Any] = {
        "steps": 2,
        "global_batch": 8,
        "seq_len": 16,
        "eval_every": 0,
        "progress": "none",
        "data.eval_fraction": 0.0,
    }
    sizes: dict[str, Any] = {"model.num_layers": 1, "model.embed_dim": 32, "model.mlp_dim": 64}
    first = tmp_path / "first"
    optimus_jax.train("llama-nano", run_dir=first, **settings, **sizes)
    exported = optimus_jax.export(first, tmp_path / "out").directory
    ways: list[dict[str, Any]] = [{"init_from": str(first)}, {"model": str(exported)}]
    losses = [
        optimus_jax.train(run_dir=tmp_path / f"run-{at}", **way, **settings, lr=1e-3).history
        for at, way in enumerate(ways)
    ]
    assert [record.loss for record in losses[0]] == [record.loss for record in losses[1]]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_weights_are_rounded_once(dtype: str, tmp_path: Path):
    run, params, config = run_of("gpt2", tmp_path)
    done = export(run, tmp_path / "out", dtype=dtype)
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
    assert sorted(path.name for path in done.directory.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tensors = open_model(done.directory).tensors
    assert {tensor.dtype.name for tensor in tensors.values()} == {names[dtype]}
    assert done.num_bytes == sum(np.asarray(tensor).nbytes for tensor in tensors.values())
    leaves = host_leaves(params)
    for path, source in leaf_sources(model_shapes(config, config.vocab_size + PADDING)).items():
        expected = leaves[path].astype(jnp.dtype(names[dtype])).astype(np.float32)
        np.testing.assert_array_equal(source.block(tensors), expected, err_msg=path)
    assert json.loads((done.directory / "config.json").read_text())["dtype"] == names[dtype]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_run_on_any_mesh_exports_the_files_of_one_device(mesh, tmp_path: Path):
    model = replace(
        model_for(MESHES[0], "gptj"), num_layers=5, num_heads=6, num_kv_heads=6, mlp_dim=96
    )
    program = build(model, mesh).program
    state = random_state(program)
    assert (EMPTY in program.shapes.slots) == (mesh is MESHES[0])
    whole = tmp_path / "mesh"
    whole.mkdir()
    (whole / "config.json").write_text(program.config.to_json())
    checkpoints = Checkpoints(whole / "checkpoints", CheckpointConfig())
    checkpoints.save(
        7,
        to_stored(state, program.shapes, program.plan, program.state_shardings),
        {"config": program.config.to_json(), "plan": program.plan.to_json(), "data": DATA},
    )
    checkpoints.close()
    leaves = in_order(program, host_leaves(state))
    one_device = model_shapes(model, model.vocab_size)
    params = jax.tree.map_with_path(
        lambda path, like: leaves[
            "params/" + jax.tree_util.keystr(path, simple=True, separator="/")
        ][tuple(slice(0, size) for size in like.shape)],
        one_device.params,
    )
    files = [
        export(run, tmp_path / name, dtype="bf16").directory / "model.safetensors"
        for run, name in (
            (whole, "a"),
            (write_run(tmp_path / "one", model, params), "b"),
        )
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    card = (files[0].parent / "README.md").read_text()
    assert f"| plan | mesh {program.plan.axes}" in card


def test_a_trained_run_is_exported_with_its_facts(tmp_path: Path):
    sizes: dict[str, Any] = {
        "model.num_layers": 1,
        "model.embed_dim": 32,
        "model.mlp_dim": 64,
    }
    trained = optimus_jax.train(
        "llama-nano",
        run_dir=tmp_path / "run",
        steps=3,
        global_batch=8,
        seq_len=16,
        mesh="fsdp=2,tensor=2,data=2",
        eval_every=3,
        progress="none",
        **sizes,
    )
    done = optimus_jax.export(tmp_path / "run", tmp_path / "out")
    texts = {
        path.name: path.read_text()
        for path in done.directory.iterdir()
        if path.suffix in (".json", ".md")
    }
    assert not any(str(tmp_path) in text or os.getcwd() in text for text in texts.values())
    card = texts["README.md"]
    assert card.startswith("---\nlibrary_name: transformers\n")
    tokens = sum(record.tokens for record in trained.history)
    assert f"| tokens seen | {tokens:,} |" in card
    assert f"| training loss | {trained.final_loss:.4f} nats per token, of step 3 |" in card
    assert "| held-out loss | " in card
    assert "| data | stdlib |" in card
    assert "| first parameters | seed 0 |" in card
    assert f"| plan | {trained.plan.describe()} |" in card
    embedding = np.asarray(open_model(done.directory).tensors["embed_tokens.weight"])
    np.testing.assert_array_equal(
        embedding, np.asarray(trained.state.params["embedding"]["table"])[:257]
    )


def test_a_damaged_newest_checkpoint_is_skipped(tmp_path: Path):
    config = config_from_huggingface(model_of("qwen3").config.to_dict())
    params = from_huggingface(state_dict_of("qwen3"), config, config.vocab_size)
    run, messages = write_run(tmp_path / "run", config, params, (7, 8)), []
    for path in (run / "checkpoints" / "8" / "state").rglob("d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    done = export(run, tmp_path / "out", warn=messages.append)
    assert done.step == 7
    assert "the checkpoint of step 8 cannot be used and is skipped" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    with pytest.raises(CheckpointError, match=r"no good checkpoint of step 8\n.*\n    8: "):
        export(run, tmp_path / "other", step=8)


def test_a_wrong_checksum_leaves_no_directory(run: Path, tmp_path: Path):
    """The values are read well, but are not those of the manifest."""
    manifest = run / "checkpoints" / "7" / "manifest" / "metadata"
    value = json.loads(manifest.read_text())
    value["content"]["leaves"]["params/layers/mlp/down"]["checksum"] += 1
    value["crc32"] = checkpoints_module.checksum_of(value["content"])
    manifest.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="checksum of params/layers/mlp/down is not what"):
        export(run, tmp_path / "out", step=7)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def no_run(run: Path, target: Path) -> None:
    (run / "config.json").unlink()


def no_checkpoint(run: Path, target: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def a_full_target(run: Path, target: Path) -> None:
    target.mkdir()
    (target / "notes.txt").write_text("mine")


def a_file(run: Path, target: Path) -> None:
    target.write_text("mine")


def a_folder_that_is_a_file(run: Path, target: Path) -> None:
    target.parent.rmdir()
    target.parent.write_text("mine")


def another_model(run: Path, target: Path) -> None:
    config = Config.from_json((run / "config.json").read_text())
    (run / "config.json").write_text(config.with_values({"model.num_layers": 3}).to_json())


def a_made_up_model(run: Path, target: Path) -> None:
    manifest = run / "checkpoints" / "7" / "manifest" / "metadata"
    value = json.loads(manifest.read_text())
    config = Config.from_json(value["content"]["metadata"]["config"])
    config = config.with_values({"model.features.activation": "relu"})
    value["content"]["metadata"]["config"] = config.to_json()
    value["crc32"] = checkpoints_module.checksum_of(value["content"])
    manifest.write_text(json.dumps(value))
    (run / "config.json").write_text(config.to_json())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (no_run, ConfigError, "there is no run to export"),
        (no_checkpoint, CheckpointError, r"no good checkpoint\n  given: .*steps none"),
        (a_full_target, ConfigError, "--to names what exists"),
        (a_file, ConfigError, "--to names what exists"),
        (a_folder_that_is_a_file, ConfigError, "--to cannot be written: Not a directory"),
        (another_model, CheckpointError, "saved with model.num_layers=2, requested 3"),
        (a_made_up_model, ConfigError, "model.features.activation is relu, and silu"),
    ],
)
def test_what_cannot_be_exported_is_an_error(change, error, message, run: Path, tmp_path: Path):
    target = tmp_path / "folder" / "out"
    target.parent.mkdir()
    change(run, target)
    before = sorted(tmp_path.glob("folder/**"))
    with pytest.raises(error, match=rf"(?s){message}.*do:"):
        export(run, target)
    assert sorted(tmp_path.glob("folder/**")) == before


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "int4"}, {"max_shard_size": "5 apples"}, {"max_shard_size": "0GB"}, {"step": 8}],
)
def test_settings_are_checked(settings: dict, run: Path, tmp_path: Path):
    with pytest.raises(OptimusError, match="do:"):
        export(run, tmp_path / "out", **settings)


def test_without_room_nothing_is_begun(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(CheckpointError, match=r"no room for the exported model\n.*, 5 free"):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_leaves_no_directory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_a_killed_process_left_is_removed(run: Path, tmp_path: Path):
    hidden = tmp_path / ".out.unfinished"
    (hidden / "folder").mkdir(parents=True)
    (hidden / "model.safetensors").write_text("half")
    (tmp_path / "out").mkdir()  # empty: as good as none
    descriptor = os.open(hidden, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process is writing this directory"):
        export(run, tmp_path / "out")
    assert (hidden / "model.safetensors").read_text() == "half"
    os.close(descriptor)
    export(run, tmp_path / "out")
    assert not hidden.exists()
    assert "folder" not in os.listdir(tmp_path / "out")


def test_an_export_can_be_stopped(run: Path, tmp_path: Path):
    stopped = replace(RunToExport.at(run, given=run), is_stopping=lambda: True)
    with pytest.raises(StoppedError):
        stopped.write(7, tmp_path / "out", Config().export, show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
