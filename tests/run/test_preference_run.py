"""A run that learns preferences: from pairs in a file, with LoRA, under a plan of eight devices."""

import json

import pytest

import optimus_jax
from optimus_jax.errors import ConfigError, DataError

TINY = {
    "model.num_layers": 2,
    "model.embed_dim": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 16,
    "model.mlp_dim": 128,
    "model.tuning.method": "lora",
    "global_batch": 8,
    "seq_len": 64,
    "progress": "none",
    "task": "dpo",
    "preference.beta": 0.5,
    "lr": 1e-2,
}


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    lines = [
        {"prompt": f"{n} is ", "chosen": "even" if n % 2 == 0 else "odd", "rejected": "neither"}
        for n in range(200)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_run_learns_what_is_preferred(pairs, tmp_path):
    done = optimus_jax.train(
        "gpt2-nano",
        data=pairs,
        mesh="pipe=2,fsdp=2,tensor=2",
        steps=12,
        eval_every=6,
        run_dir=tmp_path / "run",
        **TINY,
    )
    first, last = done.history[0], done.history[-1]
    assert first.loss == pytest.approx(0.6931, abs=1e-3)  # model and reference are the same
    assert last.metrics["preference_accuracy"] == 1
    assert last.loss < 0.3
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    evaluations = [event for event in events if event["event"] == "eval"]
    assert evaluations[-1]["metrics"]["preference_accuracy"] == 1


def test_what_the_task_needs_is_said_before_a_run_exists(pairs, tmp_path):
    command = {"mesh": "data=8", "run_dir": tmp_path / "run", "steps": 1, **TINY}
    with pytest.raises(ConfigError, match="only adapters may be trained"):
        optimus_jax.train("gpt2-nano", data=pairs, **command | {"model.tuning.method": "none"})
    with pytest.raises(DataError, match="no preference pairs"):
        optimus_jax.train("gpt2-nano", **command)
    assert not (tmp_path / "run").exists()


def test_a_reference_that_lacks_what_was_learnt_before_is_said(pairs, tmp_path, capsys):
    before = TINY | {"task": "next_token", "mesh": "data=8", "steps": 1, "eval_every": 0}
    of_pairs = before.pop("preference.beta")
    optimus_jax.train("gpt2-nano", run_dir=tmp_path / "sft", **before)
    before |= {"preference.beta": of_pairs}
    said = {}
    for rank in (16, 8):  # equal adapters are kept, others are merged
        optimus_jax.train(
            init_from=tmp_path / "sft",
            run_dir=tmp_path / f"dpo-{rank}",
            data=pairs,
            **before
            | {"task": "dpo", "progress": "plain", "model.tuning.rank": rank, "seq_len": 32},
        )
        said[rank] = capsys.readouterr()
    message = f"without what those of {tmp_path / 'sft'} have learnt"
    assert message in said[16].out + said[16].err
    assert message not in said[8].out + said[8].err
