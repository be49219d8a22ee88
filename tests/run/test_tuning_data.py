"""Runs on conversations and mixtures: the same losses however a run is stopped and laid out."""

import json
import shutil

import pytest
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.errors import DataError

TINY = {
    "global_batch": 8,
    "seq_len": 16,
    "eval_every": 0,
    "progress": "plain",
    "model.vocab_size": 257,
    "model.num_layers": 1,
    "model.embed_dim": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.mlp_dim": 32,
    "data.eval_fraction": 0.2,
    "optimizer.warmup_steps": 1,
    "optimizer.decay_steps": 4,
}


@pytest.fixture
def data(tmp_path):
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    chats = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n * n}" * 4}]
        for n in range(60)
    ]
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
    (tmp_path / "chat.jsonl").write_text("".join(lines))
    (tmp_path / "text.txt").write_text("all cats and all hats " * 60)
    return {
        "data": [f"chat=0.75:{tmp_path}/chat.jsonl", f"text=0.25:{tmp_path}/text.txt"],
        "data.chat_template": f"{tmp_path}/chat.jinja",
    }


def test_a_run_on_a_mixture_goes_on_under_another_plan(tmp_path, data):
    """With the copy of its template, and moved files."""
    settings = data | TINY
    whole = optimus_jax.train(
        "gpt2-nano",
        run_dir=tmp_path / "whole",
        steps=4,
        mesh="data=8",
        **settings | {"eval_every": 4, "checkpoint.every": 1, "checkpoint.keep": 4},
    )
    shutil.copytree(whole.run_dir, tmp_path / "run")
    for step in (2, 3, 4):  # as if killed before they were saved
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    (tmp_path / "chat.jinja").unlink()
    (tmp_path / "chat.jsonl").rename(tmp_path / "moved.jsonl")
    moved = [source.replace("chat.jsonl", "moved.jsonl") for source in data["data"]]
    changed = [source.replace("0.75", "0.5") for source in moved]
    with pytest.raises(DataError, match="not what this run was trained on"):
        optimus_jax.train(run_dir=tmp_path / "run", resume=True, data=changed, steps=4)
    resumed = optimus_jax.train(
        run_dir=tmp_path / "run",
        resume=True,
        data=moved,
        steps=4,
        mesh="data=2,fsdp=2,tensor=2",
        eval_every=0,
    )
    assert [one.plan == resumed.plan.digest for one in resumed.history] == [False] + [True] * 3
    assert [one.loss for one in resumed.history] == pytest.approx(
        [one.loss for one in whole.history], rel=1e-5
    )
    assert [one.tokens for one in resumed.history] == [one.tokens for one in whole.history]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    start = next(event for event in events if event["event"] == "start")
    assert "chat 75.00%" in start["data"]
    assert "of which count" in start["data"]
    assert any("longer than seq_len=16" in note for note in start["notes"])
