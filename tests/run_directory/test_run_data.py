"""A run identifies its data by content and keeps its tokenizer: files may move between start and
resume.
"""

import dataclasses
import gzip
import json
import shutil

import pytest
from data.test_eos import SPEAK, unigram
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.config import Config, DataConfig
from optimus_jax.config.request import make_config
from optimus_jax.data.dataset import Data, load_data
from optimus_jax.data.tokenizers import load_tokenizer
from optimus_jax.errors import DataError
from optimus_jax.inference.loading import load_text_model
from optimus_jax.inference.text_model import GenerationSettings
from optimus_jax.run import requested_config
from optimus_jax.run.inputs import Inputs
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.run_data import (
    NOT_COMPARABLE,
    check_same_data,
    check_tokenizer,
    held_out_in_run,
    identity_in_run,
    tokenizer_of_run,
)

TEXTS = [f"Hello world {'wd' * (n % 7)}" for n in range(40)] + [SPEAK] * 5
TINY = {
    "mesh": "data=8",
    "global_batch": 8,
    "seq_len": 16,
    "eval_every": 0,
    "progress": "plain",
    "model.vocab_size": 64,
    "model.num_layers": 1,
    "model.embed_dim": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.mlp_dim": 32,
}


def write_texts(path, texts):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def test_data_and_tokenizer_files_of_a_run_may_move(tmp_path, monkeypatch, capsys):
    unigram().save(str(tmp_path / "t.json"))
    write_texts(tmp_path / "a.jsonl", TEXTS[:20])
    write_texts(tmp_path / "b.jsonl", TEXTS[20:])
    run_dir = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    optimus_jax.train(
        "gpt2-nano", run_dir="run", data="*.jsonl", tokenizer="t.json", steps=1, **TINY
    )
    started = capsys.readouterr().out
    assert "documents end with  '</s>', id 2 (the usual name)" in started
    assert "data: 5 document(s) contain the text of a special token" in started
    assert load_tokenizer(str(run_dir)).digest == load_tokenizer("t.json").digest

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.move(tmp_path / "t.json", "u.json")
    moved = write_texts(tmp_path / "new" / "all.jsonl.gz", TEXTS)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(
        DataError, match=r"not what this run was trained on(.|\n)*in the same order"
    ):
        optimus_jax.train(
            run_dir=run_dir,
            resume=True,
            data=write_texts(tmp_path / "new" / "turned.jsonl", TEXTS[20:] + TEXTS[:20]),
            steps=2,
        )
    resumed = optimus_jax.train(
        "gpt2-nano",
        run_dir=run_dir,
        resume="auto",
        data="../new/*.gz",
        tokenizer="u.json",
        steps=2,
        **TINY,
    )
    assert len(resumed.history) == 2
    assert Config.from_json((run_dir / "config.json").read_text()).data.sources == (
        str(moved.parent / "*.gz"),
    )

    shutil.move("u.json", "gone.json")
    model = load_text_model(run_dir)
    assert model.tokenizer.end == "'</s>', id 2 (tokenizer_config.json)"
    with pytest.warns(UserWarning, match="it is taken as ordinary text"):
        model.generate("</s>", GenerationSettings(max_new_tokens=1))
    unigram(as_special=False).save(str(run_dir / "tokenizer.json"))
    with pytest.raises(
        DataError,
        match=r"not the one that this run was trained with\n.*digest \w+; the checkpoint says \w+",
    ):
        load_text_model(run_dir)
    with pytest.raises(DataError, match=r"a run keeps its tokenizer"):
        optimus_jax.train(run_dir=run_dir, resume=True, steps=3, **{"data.allow_change": True})


def test_paths_of_data_may_differ_between_hosts():
    here, there = (
        requested_config.shared_settings(
            make_config("gpt2", {"data": f"/{host}/a.txt", "tokenizer": f"/{host}/t.json"})
        )
        for host in "ab"
    )
    assert here == there
    assert here != requested_config.shared_settings(
        make_config("gpt2", {"data.text_field": "body"})
    )


def started(folder, *, begin=None, **data):
    """A run directory with its config and the start event."""
    run = RunDirectory.create(folder, "tiny")
    run.write_config(Config(data=DataConfig(**data)).to_json())
    if begin is not None:
        run.log_event("start", 0, identity=begin)
    run.close()
    return run


def test_an_old_run_keeps_its_way_of_holding_out_evaluation_data(tmp_path):
    assert held_out_in_run(started(tmp_path / "a", sources=("x.bin",))) == "end"
    assert held_out_in_run(started(tmp_path / "b", sources=("x.jsonl",))) == "documents"
    run = started(
        tmp_path / "c", sources=("x.jsonl",), begin={"held_out_by": "end", "content": "1"}
    )
    assert (held_out_in_run(run), identity_in_run(run)) == (
        "end",
        {"held_out_by": "end", "content": "1"},
    )
    assert identity_in_run(started(tmp_path / "d")) is None


def test_an_old_run_keeps_its_end_of_document_token(tmp_path):
    """It has no copy of its tokenizer, and files beside the original were ignored."""
    made = unigram()
    made.add_special_tokens(["<|im_end|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    named = DataConfig(tokenizer=str(tmp_path / "tokenizer.json"))
    run = started(tmp_path / "run", tokenizer=named.tokenizer)
    assert tokenizer_of_run(run, named).end == "'</s>', id 2 (the usual name)"
    run.write_tokenizer(load_tokenizer(named.tokenizer).files)
    run.write_tokenizer({"tokenizer.json": b"another"})
    assert tokenizer_of_run(
        run, named
    ).end == "'<|im_end|>', id 12 (tokenizer_config.json)".replace(
        "12", str(made.token_to_id("<|im_end|>"))
    )
    unigram().save(str(tmp_path / "other.json"))
    with pytest.raises(
        DataError,
        match=(
            r"a run keeps its tokenizer(.|\n)*other.json has digest \w+; the run began with"
            r" .*tokenizer.json"
        ),
    ):
        tokenizer_of_run(run, DataConfig(tokenizer=str(tmp_path / "other.json")))


def test_a_run_keeps_its_end_of_document_token(tmp_path):
    """Whatever its tokenizer_config.json or data.eos say later, even if changed data is allowed."""
    made = unigram()
    made.save(str(tmp_path / "tokenizer.json"))
    named = DataConfig(tokenizer=str(tmp_path / "tokenizer.json"), allow_change=True)
    files = load_tokenizer(named.tokenizer).files
    run = started(
        tmp_path / "run", tokenizer=named.tokenizer, begin={"eos": made.token_to_id("</s>")}
    )
    for name, content in files.items():
        (run.path / name).write_bytes(content)
    assert tokenizer_of_run(run, named).eos == 2
    old, own = (
        started(tmp_path / "old", tokenizer=named.tokenizer, begin={"tokenizer": "of before"}),
        load_tokenizer(named.tokenizer),
    )
    check_tokenizer(own, old, {"data": {"tokenizer": own.digest}})
    with pytest.raises(
        DataError,
        match=(
            r"token that ends a document \(eos\)\n.*it is '</s>', id 2 .*the checkpoint says id"
            r" 1(.|\n)*tokenizer_config.json"
        ),
    ):
        check_tokenizer(own, run, {"data": {"tokenizer": own.digest, "eos": 1}})
    message = (
        r"a run keeps its tokenizer, .*\(eos\)\n.*it is '<s>', id 1 \({}\); the run began with"
        r" id 2"
    )
    with pytest.raises(DataError, match=message.format("data.eos")):
        tokenizer_of_run(run, DataConfig(tokenizer=named.tokenizer, eos="<s>", allow_change=True))
    (run.path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    with pytest.raises(DataError, match=message.format("tokenizer_config.json")):
        tokenizer_of_run(run, named)
    (run.path / "tokenizer_config.json").unlink()
    assert tokenizer_of_run(run, named).eos == 2, "the usual name is the same one"


def test_a_run_keeps_its_chat_template(tmp_path):
    unigram().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    (tmp_path / "other.jinja").write_text("another")
    for name in ("bytes", str(tmp_path / "tokenizer.json")):
        asked = str(tmp_path / "chat_template.jinja")
        config = DataConfig(tokenizer=name, chat_template=asked)
        run = started(tmp_path / name[-5:], tokenizer=name, chat_template=asked)
        run.write_tokenizer(load_tokenizer(name, chat_template=asked).files)
        gone = dataclasses.replace(config, chat_template=str(tmp_path / "gone.jinja"))
        for same in (config, dataclasses.replace(config, chat_template=None)):
            assert tokenizer_of_run(run, same).chat_template.text == "{{ bos_token }}"
        with pytest.raises(DataError, match=r"keeps its chat template(.|\n)*other.jinja differs"):
            tokenizer_of_run(
                run, dataclasses.replace(config, chat_template=str(tmp_path / "other.jinja"))
            )
        with pytest.raises(DataError, match="cannot be read"):
            tokenizer_of_run(run, gone)


def test_a_copy_of_the_tokenizer_gives_its_template_the_same_special_tokens(tmp_path):
    unigram().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    for eos, text in ((None, "<s></s>"), ("<unk>", "<s><unk>")):
        config = DataConfig(tokenizer=str(tmp_path), eos=eos)
        first = load_tokenizer(config.tokenizer, eos)
        run = started(tmp_path / f"run{eos}", tokenizer=config.tokenizer)
        run.write_tokenizer(first.files)
        own = tokenizer_of_run(run, config)
        assert own.chat_template.render([]) == first.chat_template.render([]) == text
        assert own.chat_template.digest == first.chat_template.digest


def test_changed_data_may_be_allowed_and_another_tokenizer_may_not(tmp_path):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    data = load_data(
        DataConfig(sources=(str(tmp_path / "a.jsonl"),)),
        seq_len=4,
        vocab_size=257,
        model_name="tiny",
    )
    assert isinstance(data, Data)
    messages = []
    check_same_data(
        {"content": data.identity["content"], "of another version": 3},
        data,
        DataConfig(),
        messages.append,
    )
    check_same_data(None, data, DataConfig(), messages.append)
    assert messages == []
    check_same_data({"content": "0"}, data, DataConfig(allow_change=True), messages.append)
    assert messages == [
        "the data has changed, which data.allow_change allows: content was 0 and is"
        f" {data.identity['content']}; {NOT_COMPARABLE}"
    ]
    with pytest.raises(DataError, match=r"\(eos\)\n.*it is id 256, which is no byte; it was id 7"):
        check_same_data(
            {"eos": 7, "content": "0"}, data, DataConfig(allow_change=True), messages.append
        )
    with pytest.raises(DataError, match="a run keeps its tokenizer"):
        check_same_data({"tokenizer": "0"}, data, DataConfig(allow_change=True), messages.append)


def test_a_change_of_the_evaluation_tokens_is_reported(tmp_path):
    """For each setting that selects them, also under its old name; not if fewer tokens than
    requested are held out.
    """
    path = tmp_path / "d.txt"
    path.write_text("one two three four five " * 400)
    given = {
        "data": str(path),
        "seq_len": 32,
        "global_batch": 4,
        "data.eval_fraction": 0.1,
        "eval_every": 5,
    }
    before = make_config("gpt2-nano", given | {"evaluation.examples": 8, "evaluation.seq_len": 32})
    there = Inputs.of(
        make_config("gpt2-nano", given | {"evaluation.examples": 10**6})
    ).num_eval_examples
    for changes, now in (
        ({"evaluation.examples": 9}, "9 x 32"),
        ({"evaluation.examples": 8, "evaluation.seq_len": 16}, "8 x 16"),
        ({"eval_batches": 3}, "12 x 32"),
        ({"evaluation.examples": 10**6}, f"{there} x 32"),
    ):
        messages = Inputs.of(make_config("gpt2-nano", given | changes)).evaluation_change(before)
        assert messages is not None
        assert f"8 x 32 tokens before, {now} tokens from now on: {NOT_COMPARABLE}" in messages
        assert "--set evaluation.examples=8 --set evaluation.seq_len=32" in messages
    for same in (
        {"eval_batches": 2},
        {"evaluation.examples": 8, "phases": "5:16x64", "eval_every": 3},
    ):
        assert Inputs.of(make_config("gpt2-nano", given | same)).evaluation_change(before) is None
    more = make_config("gpt2-nano", given | {"evaluation.examples": 10**5})
    assert (
        Inputs.of(
            make_config("gpt2-nano", given | {"evaluation.examples": 10**6})
        ).evaluation_change(more)
        is None
    )
    none = make_config("gpt2-nano", given | {"eval_every": 0})
    assert Inputs.of(none).evaluation_change(before) is None
