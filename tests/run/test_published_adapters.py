"""Adapters that PEFT saved: a run goes on with them, saves them again, and generates with them."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import F32_RELATIVE, host_leaves
from plans import build, case, in_order, model_for
from published_models import TINY_RUN, libraries, with_tokenizer, write
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.cli import export as export_command
from optimus_jax.cli import plan as plan_command
from optimus_jax.config import Config, Tuning
from optimus_jax.errors import CheckpointError, ConfigError, OptimusError
from optimus_jax.inference.loading import load_text_model
from optimus_jax.inference.text_model import GenerationSettings
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.models.peft_format import to_peft
from optimus_jax.models.shapes import model_shapes
from optimus_jax.planning.api import config_for
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.run.adapters import save_adapters
from optimus_jax.run.initial_weights import AdapterWeights, SeedWeights
from optimus_jax.run.requested_config import requested_config
from optimus_jax.weights.peft_directory import read_peft, write_peft
from optimus_jax.weights.published_adapters import PublishedAdapters

PLANS = [
    case("pipe=2,fsdp=2,tensor=2", schedule="interleaved", microbatches=6, zero=1),
    case("data=2,fsdp=2,tensor=2", zero=3),
]
"""The first leaves slots without a layer."""
MODEL = replace(model_for(PLANS[0], "qwen2"), num_layers=5, tuning=Tuning(method="lora", rank=4))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A tiny model of the family llama, and its tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    return with_tokenizer(write("llama", "safetensors", "float32", directory))


@pytest.fixture(scope="module")
def peft_model(llama) -> Any:
    """PEFT's model of it with adapters, none of which is zero."""
    peft = pytest.importorskip("peft", reason="the reference: pip install optimus-jax[huggingface]")
    torch, transformers = libraries()
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "o_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, settings)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn_like(weight)
    return model


@pytest.fixture(scope="module")
def adapters(peft_model, tmp_path_factory) -> Path:
    """The directory that PEFT writes."""
    directory = tmp_path_factory.mktemp("adapters") / "lora"
    peft_model.save_pretrained(directory)
    return directory


def config_of(directory: Path, **settings: Any) -> Config:
    """The config of a new run that begins with what is in a directory."""
    return requested_config(
        None, None, None, False, {"init_from": str(directory), **settings}, False
    )


def test_a_run_has_the_loss_of_peft_and_goes_on(peft_model, adapters, llama, words, tmp_path):
    """PEFT merges the adapters for the reference. Nothing else is given than their directory."""
    import copy

    copy.deepcopy(peft_model).merge_and_unload().save_pretrained(tmp_path / "merged")
    with_tokenizer(tmp_path / "merged")
    command = {"data": words, "mesh": "fsdp=4,tensor=2", **TINY_RUN}
    plain = optimus_jax.train(str(llama), run_dir=tmp_path / "plain", **command)
    merged = optimus_jax.train(str(tmp_path / "merged"), run_dir=tmp_path / "dense", **command)
    theirs = shutil.copytree(adapters, tmp_path / "theirs")
    ours = optimus_jax.train(init_from=theirs, run_dir=tmp_path / "run", **command)
    assert ours.history[0].loss == pytest.approx(merged.history[0].loss, rel=F32_RELATIVE)
    assert ours.history[0].loss != pytest.approx(plain.history[0].loss, rel=1e-3)
    measured = [
        optimus_jax.evaluate(
            model, data=words, examples=8, mesh="data=8", seq_len=16, warn=lambda text: None
        ).loss
        for model in (tmp_path / "merged", theirs)
    ]
    assert measured[1] == pytest.approx(measured[0], rel=F32_RELATIVE)
    config = Config.from_json((tmp_path / "run" / "config.json").read_text())
    assert (config.init_from, config.adapters_from) == (str(llama), str(theirs))
    tuning = config.model.tuning
    assert (tuning.rank, tuning.alpha, tuning.targets) == (3, 5.0, ("query", "out", "up"))
    shutil.rmtree(theirs)
    resumed = optimus_jax.train(run_dir=tmp_path / "run", resume=True, **command | {"steps": 2})
    assert [record.step for record in resumed.history] == [1, 2]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_adapters_reach_their_layers_under_any_plan(plan, tmp_path):
    program = build(MODEL, plan).program
    assert (EMPTY in program.shapes.slots) == (plan is PLANS[0])
    rng = np.random.default_rng(0)
    whole = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape, np.float32),
        model_shapes(MODEL, MODEL.vocab_size).params,
    )
    write_peft(tmp_path, *to_peft(whole, MODEL))
    before, _ = SeedWeights(3).initial_state(program, lambda text: None)
    weights = AdapterWeights(SeedWeights(3), PublishedAdapters(tmp_path))
    state, name = weights.initial_state(program, lambda text: None)
    assert name == "seed 3"
    expected = in_order(program, host_leaves(before))
    adapters = {
        path: leaf for path, leaf in host_leaves({"params": whole}).items() if "_adapter/" in path
    }
    assert adapters.keys() < expected.keys()
    for path, leaf in in_order(program, host_leaves(state)).items():
        np.testing.assert_array_equal(leaf, (expected | adapters)[path], err_msg=path)
    empty = np.array(program.shapes.slots) == EMPTY
    leaves = host_leaves(state.params["layers"])
    assert not any(leaf[empty].any() for leaf in leaves.values())
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == program.state_shardings


def test_the_command_writes_what_peft_loads_and_a_run_begins_with(
    adapters, llama, words, tmp_path, monkeypatch, capsys
):
    libraries()
    import peft

    run, to = tmp_path / "run", tmp_path / "again"
    done = optimus_jax.train(
        init_from=adapters,
        run_dir=run,
        data=words,
        mesh="fsdp=4,tensor=2",
        **TINY_RUN | {"lr": 0.1},
    )
    monkeypatch.setattr("sys.argv", ["export", "--run", str(run), "--to", str(to), "--adapters"])
    export_command.main()
    assert capsys.readouterr().out == f"{to}: adapters after step 1\n"
    assert {path.name for path in to.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    model = peft.AutoPeftModelForCausalLM.from_pretrained(to)
    held = {name: each.numpy() for name, each in peft.get_peft_model_state_dict(model).items()}
    config, tensors = read_peft(to)
    assert config["base_model_name_or_path"] == str(llama)
    assert held.keys() == tensors.keys() == read_peft(adapters)[1].keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(held[name], tensor)
    _, params = PublishedAdapters(to).read(config_of(to).model)
    leaves = host_leaves(done.state.params)
    for path, leaf in host_leaves(params).items():
        np.testing.assert_array_equal(leaf, leaves[path], err_msg=path)

    how = GenerationSettings(temperature=0, max_new_tokens=8)
    texts = [list(load_text_model(each).generate("the cat", how)) for each in (run, to, llama)]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        export_command.main()


def test_adapters_alone_are_refused_where_they_would_mislead(llama, words, tmp_path):
    command = {"data": words, "mesh": "data=8", **TINY_RUN}
    run = tmp_path / "dense"
    optimus_jax.train(str(llama), run_dir=run, **command)
    with pytest.raises(ConfigError, match="the run has no adapters"):
        save_adapters(run, tmp_path / "out")
    lora = {"model.tuning.method": "lora", "model.tuning.freeze": "embedding,attention,mlp"}
    optimus_jax.train(str(llama), run_dir=tmp_path / "norms", **command, **lora)
    with pytest.raises(ConfigError, match=r"(?s)trained more than its adapters.*head, norm"):
        save_adapters(tmp_path / "norms", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_of_a_run_with_added_tokens_are_not_saved_alone(llama, words, tmp_path, capsys):
    """PEFT's model of them would have no rows for these tokens, or others."""
    more = {"data": words, "mesh": "fsdp=8", "model.tuning.method": "lora", **TINY_RUN}
    one, two = tmp_path / "one", tmp_path / "two"
    added = {"model.vocab_size": 40, "progress": "plain"}
    optimus_jax.train(str(llama), run_dir=one, **more | added)
    said = " ".join(capsys.readouterr().out.split())
    assert "3 tokens that" in said
    assert "stay so, being frozen (embedding, head); to train them: --set" in said
    optimus_jax.train(init_from=one, run_dir=two, **more)
    for run in (one, two):
        with pytest.raises(ConfigError, match=r"(?s)added tokens.*=40.*has 37.*whole model"):
            save_adapters(run, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    config = json.loads((llama / "config.json").read_text())
    larger = tmp_path / "larger"
    larger.mkdir()
    (larger / "config.json").write_text(json.dumps(config | {"vocab_size": 40}))
    save_adapters(one, tmp_path / "out", base=str(larger))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    with pytest.raises(CheckpointError, match=r"not for this model(.|\n)*num_layers=7, the run"):
        save_adapters(two, tmp_path / "second", base=str(other))
    gpt2 = write("gpt2", "safetensors", "float32", tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match=r"model.family=gpt2, the run llama"):
        save_adapters(two, tmp_path / "second", base=str(gpt2))
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        (["--adapters", "--dtype", "bf16"], "--dtype with --adapters"),
        (["--adapters", "--max-shard-size", "1GB"], "--max-shard-size with --adapters"),
        (["--base", "x/y"], "--base without --adapters"),
    ],
)
def test_flags_of_the_other_kind_of_export_are_refused(flags, wrong, monkeypatch):
    monkeypatch.setattr("sys.argv", ["export", "--run", "r", "--to", "t", *flags])
    with pytest.raises(ConfigError, match=wrong):
        export_command.main()


def test_adapters_name_the_model_that_a_run_and_those_before_it_began_with(
    adapters, llama, words, tmp_path
):
    """A run that goes on with another run's adapters has the base of that run."""
    command = {"data": words, "mesh": "data=8", **TINY_RUN}
    optimus_jax.train(init_from=adapters, run_dir=tmp_path / "one", **command)
    optimus_jax.train(init_from=tmp_path / "one", run_dir=tmp_path / "two", **command)
    save_adapters(tmp_path / "two", tmp_path / "out")
    assert read_peft(tmp_path / "out")[0]["base_model_name_or_path"] == str(llama)
    said: list[str] = []
    save_adapters(tmp_path / "two", tmp_path / "named", base="hf://ORG/tiny@main", warn=said.append)
    assert [text.partition(":")[0] for text in said] == [
        "whether the adapters are for hf"  # which nothing is fetched for
    ]
    config, _ = read_peft(tmp_path / "named")
    assert (config["base_model_name_or_path"], config["revision"]) == ("ORG/tiny", "main")
    assert PublishedAdapters(tmp_path / "named").base("") == "hf://ORG/tiny@main"
    with pytest.raises(ConfigError, match="adapters are for a model without others"):
        optimus_jax.train(
            init_from=tmp_path / "one", adapters_from=adapters, run_dir=tmp_path / "x", **command
        )


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"peft_type": "PREFIX_TUNING"}, r"peft_type='PREFIX_TUNING'"),
        ({"peft_type": None}, r"peft_type='None'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"r": "three"}, "(?s)r='three'.*a whole number"),
        ({"r": 8}, "(?s)another rank.*rank 3.*says 8"),
        ({"lora_alpha": [1]}, "(?s)lora_alpha=.*a number"),
        ({"lora_alpha": -1}, "alpha"),
        ({"lora_dropout": 2}, "dropout"),
        ({"alpha_pattern": [1]}, "(?s)alpha_pattern=.*an object of numbers"),
        ({"alpha_pattern": {"self_attn.q_proj": 7}}, "one factor for all modules"),
        ({"base_model_name_or_path": None}, "(?s)base_model_name_or_path=None.*--model DIR"),
        ({"base_model_name_or_path": "gone"}, "(?s)'gone'.*--model DIR"),
    ],
    ids=str,
)
def test_a_directory_that_cannot_be_used_is_one_error_before_a_run_exists(
    adapters, changes, wrong, tmp_path, monkeypatch
):
    directory = shutil.copytree(adapters, tmp_path / "adapters")
    config = json.loads((adapters / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | changes))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptimusError, match=wrong):
        optimus_jax.train(init_from=directory, run_dir="run")
    assert not Path("run").exists()


def test_adapters_of_another_model_or_other_settings_are_refused(adapters, tmp_path):
    other = with_tokenizer(write("qwen2", "safetensors", "float32", tmp_path / "qwen2"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(OptimusError, match=r"(?s)does not fit its matrix.*32"):
        optimus_jax.train(str(other), init_from=adapters, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"(?s)of other adapters.*rank=4.*has.*rank=3"):
        config_of(adapters, **{"model.tuning.rank": 4})
    with pytest.raises(ConfigError, match="need the model that they are for"):
        optimus_jax.train("llama-nano", adapters_from=adapters, run_dir=tmp_path / "run")
    kept = config_of(
        adapters, **{"model.tuning.dropout": 0.1, "model.tuning.base_precision": "bf16"}
    )
    assert (kept.model.tuning.dropout, kept.model.tuning.rank) == (0.1, 3)
    adapters_without = shutil.copytree(adapters, tmp_path / "no-weights")
    (adapters_without / "adapter_model.safetensors").unlink()
    with pytest.raises(OptimusError, match=r"adapter_model.safetensors"):
        config_of(adapters_without)
    (adapters_without / "adapter_model.bin").touch()
    with pytest.raises(OptimusError, match=r"(?s)adapter_model.bin and no.*safe_serialization"):
        config_of(adapters_without)


def test_adapters_are_planned_for_with_their_model(adapters, capsys, monkeypatch):
    """`plan` names the flag with which `train` begins with them."""
    found = config_for(str(adapters), Cluster.parse("h100:2"), {"data.seq_len": 16})
    assert found.model == config_of(adapters).model
    assert found.model.tuning.rank == 3
    for contradiction in ({"model.tuning.rank": 4}, {"model.tuning.method": "none"}):
        with pytest.raises(ConfigError, match="the settings are those of other adapters"):
            config_for(str(adapters), Cluster.parse("h100:2"), contradiction)
    flags = ["--cluster", "h100:2", "--seq-len", "16", "--top", "1"]
    monkeypatch.setattr(sys, "argv", ["plan", "--model", str(adapters), *flags])
    plan_command.main()
    assert f" --init-from {adapters} " in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--init-from=", "--set=init_from="])
def test_adapters_beside_a_model_are_planned_for(flag, adapters, llama, capsys, monkeypatch):
    """Ignored, they would be a plan to train the whole model."""
    given = ["--model", str(llama), f"{flag}{adapters}", "--seq-len", "16", "--top", "1"]
    parsed = plan_command.parser().read(given)
    found = config_for(str(llama), Cluster.parse("h100:2"), plan_command.overrides(parsed))
    assert found.model == config_of(adapters).model
    monkeypatch.setattr(sys, "argv", ["plan", "--cluster", "h100:2", *given])
    plan_command.main()
    command = capsys.readouterr().out.partition("train with:")[2]
    assert f"--model {llama} " in command
    assert f" --init-from {adapters}" in command


def test_a_plan_refuses_other_parameters(llama):
    with pytest.raises(ConfigError, match=f"give --model {llama}, without --init-from"):
        config_for("llama-nano", Cluster.parse("h100:2"), {"init_from": str(llama)})


@pytest.mark.parametrize("method", ["none", "ia3"])
def test_adapters_of_a_directory_are_not_replaced_at_a_start(method, adapters):
    with pytest.raises(ConfigError, match="to merge them, export that run") as caught:
        config_of(adapters, **{"model.tuning.method": method})
    assert f"given: model.tuning.method={method}; {adapters} has lora" in str(caught.value)
