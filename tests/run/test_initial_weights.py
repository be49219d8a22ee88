"""A new run's parameters: of another run under another plan, or of Hugging Face's tensors."""

import functools
import json
import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import F32_RELATIVE, fitted, host_leaves, relative_error
from plans import VOCAB_SIZE, build, case, in_order, model_for, random_state
from shared_programs import shared_programs  # noqa: F401
from tensor_weights import TensorWeights

import optimus_jax
from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import CheckpointConfig, Tuning
from optimus_jax.config.run_checkpoint import RunCheckpoint
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import CheckpointError, ConfigError, DataError
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.models.huggingface import from_huggingface, to_huggingface
from optimus_jax.models.huggingface_tensors import LeafSource
from optimus_jax.models.merging import merged
from optimus_jax.models.peft_reading import from_peft
from optimus_jax.reshard.restack import is_stacked
from optimus_jax.run import published_weights
from optimus_jax.run.adapters import save_adapters
from optimus_jax.run.initial_weights import RunWeights, SeedWeights
from optimus_jax.store.mirror import Mirror
from optimus_jax.store.objects import Objects
from optimus_jax.system.paths import Url
from optimus_jax.training.state import to_stored
from optimus_jax.weights.peft_directory import read_peft

INTERLEAVED = case("pipe=2,fsdp=2,tensor=2", schedule="interleaved", microbatches=6, zero=1)
SPLIT = case("data=2,fsdp=2,tensor=2", zero=3)
OVER_THREE = case("fsdp=2,tensor=3", zero=2)
"""Pads the vocabulary to another number of rows."""
MODEL = replace(
    model_for(INTERLEAVED, "gptj"), num_layers=5, num_heads=6, num_kv_heads=6, mlp_dim=96
)
"""Has a bias over the vocabulary; its layers leave slots of the interleaved stages empty."""
DATA = {"tokenizer": "abc", "eos": 7}
MOST_BYTES = 800
"""Less than a column of a matrix, so that every dimension is split."""
TINY = {
    "global_batch": 8,
    "seq_len": 16,
    "lr": 1e-2,
    "eval_every": 0,
    "progress": "none",
    "data.eval_fraction": 0.0,
}
SIZES = {
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 8,
    "model.mlp_dim": 64,
}


@functools.cache
def program_of(model, of):
    """The program of a model under a plan of this file."""
    return build(model, of).program


def check_begins_with(state, program, expected):
    """Assert that the parameters are `expected`, whole and in order, and all else is new."""
    leaves, fresh = host_leaves(state), host_leaves(program.init(np.int32(0)))
    assert leaves.keys() == fresh.keys()
    for path, leaf in in_order(program, leaves).items():
        if path.startswith("params/"):
            np.testing.assert_array_equal(leaf, fitted(expected[path], leaf.shape), err_msg=path)
        else:
            np.testing.assert_array_equal(leaves[path], fresh[path], err_msg=path)
    empty = np.array(program.shapes.slots) == EMPTY
    assert not any(leaf[empty].any() for path, leaf in leaves.items() if is_stacked(path))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == program.state_shardings


@pytest.fixture(scope="module")
def interleaved_run(tmp_path_factory):
    """A run directory with checkpoints of steps 1 and 2, and the parameters of step 2."""
    run, program = tmp_path_factory.mktemp("runs") / "a", program_of(MODEL, INTERLEAVED)
    assert EMPTY in program.shapes.slots
    state = random_state(program)
    moved = jax.tree.map(lambda leaf: leaf + np.ones((), leaf.dtype), state)
    run.mkdir()
    (run / "config.json").write_text(program.config.to_json())
    checkpoints = Checkpoints(run / "checkpoints", CheckpointConfig())
    for step, params in ((1, state.params), (2, state.params)):
        stored = replace(moved, params=params)
        checkpoints.save(
            step,
            to_stored(stored, program.shapes, program.plan, program.state_shardings),
            {
                "config": program.config.to_json(),
                "plan": program.plan.to_json(),
                "data": DATA,
            },
        )
    checkpoints.close()
    return run, in_order(program, host_leaves(state))


def weights_of(run, **changes):
    return RunWeights(named=RunCheckpoint.parse(str(run), what="--init-from"), **DATA | changes)


@pytest.mark.parametrize("to", [SPLIT, OVER_THREE, INTERLEAVED], ids=str)
def test_a_run_begins_with_parameters_saved_under_another_plan(interleaved_run, to):
    run, expected = interleaved_run
    program = build(MODEL, to, {"model.dropout": 0.1}).program
    if to == OVER_THREE:
        assert program.shapes.vocab_rows != len(expected["params/embedding/table"])
    state, source = weights_of(run).initial_state(program, lambda text: None)
    check_begins_with(state, program, expected)
    assert expected["params/head_bias"][:VOCAB_SIZE].any()
    assert source == f"{run}@2"


def test_a_damaged_newest_checkpoint_is_skipped_and_stays(interleaved_run, tmp_path):
    run = shutil.copytree(interleaved_run[0], tmp_path / "run")
    (run / "checkpoints" / "2" / "manifest" / "metadata").write_text("{")
    before, messages = sorted(run.rglob("*")), []
    program = program_of(MODEL, SPLIT)
    _, source = weights_of(run).initial_state(program, messages.append)
    assert source == f"{run}@1"
    assert any("step 2 is damaged" in message for message in messages)
    assert sorted(run.rglob("*")) == before


def test_a_run_in_a_store_is_copied_and_read(interleaved_run, tmp_path, monkeypatch):
    run, expected = interleaved_run
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    objects = Objects(Url("memory", f"{tmp_path.name}/run"))
    objects._fs.mkdir(f"/{tmp_path.name}")
    mirror = Mirror(
        shutil.copytree(run, tmp_path / "run"),
        objects,
        staging=tmp_path / "staging",
        lease=None,
        every_s=1e9,
        keep=2,
        keep_every=None,
        warn=pytest.fail,
        settle_s=0,
    )
    mirror.finish(lambda text: None)
    program = program_of(MODEL, SPLIT)
    state, source = weights_of(f"{objects.url}@2").initial_state(program, lambda text: None)
    check_begins_with(state, program, expected)
    assert source == f"{objects.url}@2"


@pytest.mark.parametrize(
    ("model", "named", "changes", "error", "text"),
    [
        ({}, "@3", {}, CheckpointError, r"no good checkpoint of step 3"),
        ({"mlp_dim": 48}, "", {}, CheckpointError, r"mlp_dim=96, requested 48(.|\n)*leave --model"),
        ({"num_layers": 4}, "@1", {}, CheckpointError, r"num_layers=5, requested 4"),
        ({}, "", {"tokenizer": "x"}, DataError, r"digest x(.|\n)*has abc(.|\n)*--tokenizer bytes"),
    ],
)
def test_a_checkpoint_of_another_model_or_tokenizer_is_an_error(
    interleaved_run, model, named, changes, error, text
):
    program = program_of(replace(MODEL, **model), SPLIT)
    with pytest.raises(error, match=text):
        weights_of(f"{interleaved_run[0]}{named}", **changes).initial_state(program, print)


def test_another_end_of_documents_is_told(interleaved_run):
    messages = []
    program = program_of(MODEL, SPLIT)
    weights_of(interleaved_run[0], eos=8).initial_state(program, messages.append)
    assert any("end with token 8" in message and "token 7" in message for message in messages)


@pytest.mark.parametrize("to", [SPLIT, INTERLEAVED], ids=str)
def test_tensors_of_hugging_face_go_to_the_devices_in_shards(to, monkeypatch):
    rng, program = np.random.default_rng(0), program_of(MODEL, to)
    one = program_of(MODEL, case("data=1", zero=0)).shapes
    params = jax.tree.map(lambda leaf: rng.random(leaf.shape, np.float32), one.params)
    tensors = to_huggingface(params, MODEL)
    expected = from_huggingface(tensors, MODEL, program.shapes.vocab_rows)
    read, block = [], LeafSource.block

    def recorded(source, tensors, box):
        read.append(block(source, tensors, box))
        return read[-1]

    monkeypatch.setattr(LeafSource, "block", recorded)
    monkeypatch.setattr(published_weights, "BOX_BYTES", MOST_BYTES)
    state, source = TensorWeights(tensors, "a test").initial_state(program, print)
    check_begins_with(
        state, program, {f"params/{path}": leaf for path, leaf in host_leaves(expected).items()}
    )
    assert source == "a test"
    assert max(part.nbytes for part in read) <= MOST_BYTES
    assert sum(part.nbytes for part in read) == sum(
        leaf.nbytes for leaf in jax.tree.leaves(state.params)
    )


def test_parameters_from_a_seed_are_those_of_the_program():
    program = program_of(MODEL, SPLIT)
    state, source = SeedWeights(5).initial_state(program, print)
    assert source == "seed 5"
    for path, leaf in host_leaves(program.init(np.int32(5))).items():
        np.testing.assert_array_equal(host_leaves(state)[path], leaf)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the cat sat on the mat\n" * 100)
    return str(path)


@pytest.fixture(scope="module")
def source(text, tmp_path_factory):
    """A run of one step."""
    result = optimus_jax.train(
        "gpt2-nano",
        run_dir=tmp_path_factory.mktemp("runs") / "source",
        data=text,
        mesh="data=8",
        steps=1,
        **TINY,
        **SIZES,
    )
    return result.run_dir


def begun_with(run_dir):
    """The field `weights` of every start."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event["weights"] for event in events if event["event"] in ("start", "resume")]


def test_a_run_that_began_from_another_continues_from_its_own_checkpoint(source, text, tmp_path):
    gone, run_dir = shutil.copytree(source, tmp_path / "gone"), tmp_path / "run"
    command = {
        "init_from": gone,
        "run_dir": run_dir,
        "resume": "auto",
        "data": text,
        "mesh": "fsdp=8",
        "steps": 3,
        "checkpoint_every": 2,
        "model.dropout": 0.1,
        **TINY,
    }
    new = optimus_jax.train(**command)
    assert [record.step for record in new.history] == [1, 2, 3]
    shutil.rmtree(run_dir / "checkpoints" / "3")  # as if killed before it was saved
    shutil.rmtree(gone)
    resumed = optimus_jax.train(**command)
    assert [record.loss for record in resumed.history] == [record.loss for record in new.history]
    assert begun_with(run_dir) == [f"{gone}@1", None]
    config = json.loads((run_dir / "config.json").read_text())
    assert config["init_from"] == str(gone)
    assert config["model"]["embed_dim"] == SIZES["model.embed_dim"]
    with pytest.raises(ConfigError, match=r"keeps its model(.|\n)*changes to init_from"):
        optimus_jax.train(run_dir=run_dir, resume=True, init_from=source)


def test_a_run_killed_before_its_first_checkpoint_starts_over_from_the_same_one(
    source, text, tmp_path
):
    other, run_dir = shutil.copytree(source, tmp_path / "other"), tmp_path / "run"
    first = optimus_jax.train(
        init_from=other, run_dir=run_dir, data=text, mesh="fsdp=8", steps=1, **TINY
    )
    shutil.rmtree(run_dir / "checkpoints")
    optimus_jax.train(run_dir=other, resume=True, steps=2)  # the other run has gone on
    again = optimus_jax.train(run_dir=run_dir, resume=True)
    assert begun_with(run_dir) == [f"{other}@1", f"{other}@1"]
    assert again.final_loss == first.final_loss
    shutil.rmtree(run_dir / "checkpoints")
    shutil.rmtree(other)
    with pytest.raises(ConfigError, match=re.escape(f"{other}, which is not a directory")):
        optimus_jax.train(run_dir=run_dir, resume=True)


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("missing", "which is not a directory"),
        ("file", "which is not a directory"),
        ("empty", "has no config.json"),
    ],
)
@pytest.mark.parametrize("model", [None, "gpt2-nano"])
def test_a_directory_that_holds_no_run_is_an_error(tmp_path, named, given, model):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=rf"(?s)neither a run nor.*{given}.*DIR@STEP"):
        optimus_jax.train(model, init_from=tmp_path / named, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_model_is_an_error_before_any_work(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"has model.num_layers=1, requested 4"):
        optimus_jax.train("gpt2-nano", init_from=source, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


LORA = Tuning(method="lora", rank=4, base_precision="bf16")


def saved_run(run, program, state, data=DATA):
    """A run directory with a checkpoint of `state`."""
    run.mkdir()
    (run / "config.json").write_text(program.config.to_json())
    checkpoints = Checkpoints(run / "checkpoints", CheckpointConfig())
    stored = to_stored(state, program.shapes, program.plan, program.state_shardings)
    metadata = {"config": program.config.to_json(), "plan": program.plan.to_json(), "data": data}
    checkpoints.save(1, stored, metadata)
    checkpoints.close()


def test_a_run_with_adapters_begins_with_another_runs_parameters(interleaved_run):
    run, expected = interleaved_run
    program = program_of(replace(MODEL, tuning=LORA), OVER_THREE)
    state, _ = weights_of(run).initial_state(program, lambda text: None)
    leaves, fresh = (host_leaves(each) for each in (state, program.init(np.int32(0))))
    for path, leaf in in_order(program, leaves).items():
        if path in expected and path.startswith("params/"):
            wanted = fitted(expected[path], leaf.shape).astype(leaf.dtype)
            np.testing.assert_array_equal(leaf, wanted, err_msg=path)
    assert leaves["params/layers/mlp/up"].dtype == "bfloat16"
    for path in (path for path in leaves if "_adapter/" in path or path.startswith("opt_state")):
        np.testing.assert_array_equal(leaves[path], fresh[path], err_msg=path)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == program.state_shardings


@pytest.mark.parametrize("tuning", [Tuning(), LORA], ids=["merged", "the same"])
def test_adapters_of_another_run_are_kept_or_merged(tmp_path, tuning):
    source = program_of(replace(MODEL, tuning=LORA), SPLIT)
    before = random_state(source)
    saved_run(tmp_path / "tuned", source, before)
    program, messages = program_of(replace(MODEL, tuning=tuning), INTERLEAVED), []
    state, _ = weights_of(tmp_path / "tuned").initial_state(program, messages.append)
    said = [text for text in messages if "are merged into the parameters" in text]
    assert len(said) == (tuning != LORA)
    assert all("rank=4" in text and "new ones" not in text for text in said)
    assert not any("rounded" in text for text in said)
    params = (
        before.params
        if tuning == LORA
        else jax.jit(lambda params: merged(params, source.shapes))(before.params)
    )
    found = in_order(program, host_leaves({"params": state.params}))
    for path, leaf in in_order(source, host_leaves({"params": params})).items():
        assert found[path].dtype == leaf.dtype
        ours = fitted(found[path], leaf.shape)
        if tuning == LORA:
            np.testing.assert_array_equal(ours, leaf, err_msg=path)
        else:
            assert relative_error(ours, leaf) < F32_RELATIVE, path


def test_a_start_says_if_merged_adapters_are_rounded_to_codes(tmp_path):
    source = program_of(replace(MODEL, tuning=LORA), SPLIT)
    saved_run(tmp_path / "tuned", source, source.init(np.int32(0)))
    own = replace(LORA, rank=LORA.rank + 1, base_precision="int8")
    messages: list[str] = []
    program = program_of(replace(MODEL, tuning=own), SPLIT)
    weights_of(tmp_path / "tuned").initial_state(program, messages.append)
    (said,) = [text for text in messages if "are merged into the parameters" in text]
    assert "rounded to int8" in said
    assert "give the new run the same adapters, or set model.tuning.base_precision=bf16" in said


def test_adapters_are_saved_alone(tmp_path):
    program = program_of(replace(MODEL, tuning=LORA), INTERLEAVED)
    state = random_state(program)
    of_bytes = {"tokenizer": ByteTokenizer.digest, "eos": 256}
    saved_run(tmp_path / "tuned", program, state, of_bytes)
    with pytest.warns(UserWarning, match="name no model"):
        assert save_adapters(tmp_path / "tuned", tmp_path / "adapters") == 1
    tuning, params = from_peft(*read_peft(tmp_path / "adapters"), MODEL)
    assert tuning.rank == LORA.rank
    found = host_leaves({"params": params})
    expected = in_order(program, host_leaves({"params": state.params}))
    assert found.keys() == {path for path in expected if "_adapter/" in path}
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)
