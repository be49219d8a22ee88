"""A run whose data and optimizer are objects of a program."""

import json
from dataclasses import replace

import grain
import numpy as np
import optax
import pytest
from helpers import F32_RELATIVE, assert_close

import optimus_jax
from optimus_jax.errors import ConfigError, DataError
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.own_optimizer import check_elementwise
from optimus_jax.training.tasks import NEXT_TOKEN, TASKS

RECORDS = [{"text": f"the sum of {n} and {n} is {2 * n}"} for n in range(200)]
OPTIONS = {
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.mlp_dim": 64,
    "seq_len": 32,
    "global_batch": 8,
    "mesh": "data=2,fsdp=2,tensor=2",
    "eval_every": 0,
    "progress": "none",
    "control": "off",
    "data.eval_fraction": 0.1,
}
"""Of a run that takes a second."""


def losses(result):
    return np.array([step.loss for step in result.history])


def test_objects_train_as_what_has_names_and_are_needed_again(tmp_path):
    adam = {
        "lr": 1e-2,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0.0,
    }
    named = optimus_jax.train(
        "gpt2-nano",
        data=RECORDS,
        optimizer="adamw",
        steps=4,
        run_dir=tmp_path / "named",
        **OPTIONS | adam,
    )
    own, run = optax.adam(1e-2, b2=0.95), {"run_dir": tmp_path / "own"}
    first = optimus_jax.train("gpt2-nano", data=RECORDS, optimizer=own, steps=2, **run, **OPTIONS)
    assert_close(losses(first), losses(named)[:2], F32_RELATIVE)
    again = {"resume": True, "steps": 4, "progress": "none"}
    with pytest.raises(ConfigError, match=r"(?s)optimizer.name is an object.*optimizer=\.\.\."):
        optimus_jax.train(data=RECORDS, **run, **again)
    with pytest.raises(ConfigError, match=r"(?s)data.sources is an object.*data=\.\.\."):
        optimus_jax.train(optimizer=own, **run, **again)
    after = optimus_jax.train(data=RECORDS, optimizer=own, **run, **again)
    assert_close(losses(after), losses(named), F32_RELATIVE)
    with pytest.raises(ConfigError, match=r"(?s)its data was an object.*--data"):
        optimus_jax.evaluate(tmp_path / "own", warn=lambda text: None)
    found = optimus_jax.evaluate(
        tmp_path / "own", data=RECORDS[:20], mesh="data=8", warn=lambda text: None
    )
    assert 0 < found.loss < losses(first)[0]


def test_held_out_data_of_its_own_is_all_that_is_measured(tmp_path):
    others = [{"text": f"{n} and {n} make {2 * n}, and no more"} for n in range(30)]
    path = tmp_path / "others.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in others))
    settings = OPTIONS | {"eval_every": 2, "mesh": "data=8"}
    run = tmp_path / "run"
    optimus_jax.train("gpt2-nano", data=RECORDS, eval_data=path, steps=2, run_dir=run, **settings)
    (event,) = [one for one in RunDirectory(run).events() if one["event"] == "eval"]
    found = optimus_jax.evaluate(run, data=others, mesh="data=8", warn=lambda text: None)
    assert found.loss == pytest.approx(event["loss"], rel=F32_RELATIVE)
    again = {"run_dir": run, "resume": True, "progress": "none", "data": RECORDS}
    given = optimus_jax.train(eval_data=others[:20], steps=4, **again)
    assert given.reason == "done"
    with pytest.raises(ConfigError, match=r"(?s)evaluation.data is an object.*eval_data=\.\.\."):
        optimus_jax.train(steps=6, **again)
    optimus_jax.train(eval_data=path, steps=6, **again)
    with pytest.raises(DataError, match=r"(?s)share of its data.*0.1 of the data is held out; it"):
        optimus_jax.train(steps=6, **again, **{"evaluation.data": ()})
    found = optimus_jax.evaluate(run, mesh="data=8", warn=lambda text: None)
    assert found.num_terms == event["tokens"]


@pytest.mark.parametrize(
    ("eval_data", "message"),
    [
        (lambda: of_grain(), "has to have an end"),
        (lambda: ["a=1:x"], "has no weights"),
        (list, "eval_data= is empty"),
    ],
)
def test_held_out_data_is_named_alone_and_ends(tmp_path, eval_data, message):
    with pytest.raises((ConfigError, DataError), match=message):
        optimus_jax.train("gpt2-nano", data=RECORDS, eval_data=eval_data(), run_dir=tmp_path / "r")


def of_grain():
    return iter(grain.MapDataset.source(RECORDS).shuffle(seed=1).repeat().to_iter_dataset())


def test_an_iterator_goes_on_where_a_checkpoint_left_it(tmp_path):
    settings = {"steps": 6, "checkpoint.every": 2, "optimizer.decay_steps": 6, **OPTIONS}
    data = of_grain()  # a run puts it back
    whole = optimus_jax.train("gpt2-nano", data=data, run_dir=tmp_path / "a", **settings)
    run = {"run_dir": tmp_path / "b"}
    optimus_jax.train("gpt2-nano", data=data, **run, **settings | {"steps": 3})
    again = {"resume": True, "steps": 6, "progress": "none"}
    with pytest.raises(ConfigError, match=r"data\.sources is an object"):
        optimus_jax.train(**run, **again)
    with pytest.raises(DataError, match="not what this run was trained on"):
        optimus_jax.train(data=RECORDS, **run, **again)
    moved = of_grain()
    next(moved)
    with pytest.raises(DataError, match="if it was read before, make a new one"):
        optimus_jax.train(data=moved, **run, **again)
    after = optimus_jax.train(data=data, mesh="data=8", **run, **again)
    assert_close(losses(after), losses(whole), F32_RELATIVE)
    with pytest.raises(DataError, match="has to have an end"):
        optimus_jax.evaluate(tmp_path / "a", data=of_grain(), warn=lambda text: None)
    phases = {"phases": "2:x16"}
    with pytest.raises(DataError, match="have one length"):
        optimus_jax.train("gpt2-nano", data=of_grain(), run_dir=tmp_path / "c", **settings | phases)
    few = iter(grain.MapDataset.source(RECORDS[:10]).to_iter_dataset())
    with pytest.raises(DataError, match="has ended"):
        optimus_jax.train("gpt2-nano", data=few, run_dir=tmp_path / "d", **settings)


def test_a_task_is_given_as_an_object_and_needed_again(tmp_path):
    def doubled(inputs):
        sums = TASKS[NEXT_TOKEN].loss(inputs)
        return sums._replace(loss=2 * sums.loss)

    own, run = replace(TASKS[NEXT_TOKEN], loss=doubled), {"run_dir": tmp_path / "own"}
    usual = optimus_jax.train(
        "gpt2-nano", data=RECORDS, steps=1, run_dir=tmp_path / "usual", **OPTIONS
    )
    first = optimus_jax.train("gpt2-nano", data=RECORDS, task=own, steps=1, **run, **OPTIONS)
    assert_close(losses(first), 2 * losses(usual), F32_RELATIVE)
    again = {"resume": True, "steps": 2, "progress": "none", "data": RECORDS}
    optimus_jax.train(
        "gpt2-nano", data=RECORDS, steps=1, run_dir=tmp_path / "other", **OPTIONS
    )  # without it: the run before leaves nothing behind
    with pytest.raises(ConfigError, match=r"(?s)task is an object.*task=\.\.\."):
        optimus_jax.train(**run, **again)
    after = optimus_jax.train(task=own, **run, **again)
    assert losses(after)[1] > 1.5 * losses(usual)[0]
    measured = {"data": RECORDS[:20], "warn": lambda text: None}
    with pytest.raises(ConfigError, match=r"(?s)its task was an object.*--task next_token"):
        optimus_jax.evaluate(tmp_path / "own", **measured)
    found, usually = (
        optimus_jax.evaluate(tmp_path / "own", task=task, **measured) for task in (own, NEXT_TOKEN)
    )
    assert found.loss == pytest.approx(2 * usually.loss, rel=F32_RELATIVE)
    with pytest.raises(ConfigError, match="a task is a name, or a Task"):
        optimus_jax.train("gpt2-nano", task=doubled, run_dir=tmp_path / "no", **OPTIONS)
    with pytest.raises(ConfigError, match=r"(?s)unknown task 'clasification'.*did you mean"):
        optimus_jax.train("gpt2-nano", task="clasification", run_dir=tmp_path / "no", **OPTIONS)


def test_a_run_with_objects_is_alone_in_its_program(tmp_path):
    named, own = {"steps": 2, **OPTIONS}, {"optimizer": optax.sgd(0.1)}
    with optimus_jax.training_loop(
        "gpt2-nano", train_dataset=RECORDS, run_dir=tmp_path / "outer", **own, **named
    ) as loop:
        for number, batch in enumerate(loop):
            loop.step(batch)
            with pytest.raises(ConfigError, match=r"(?s)two runs at a time.*end the other"):
                optimus_jax.train("gpt2-nano", run_dir=tmp_path / f"inner-{number}", **named)
    assert loop.reason == "done"
    with optimus_jax.training_loop(
        "gpt2-nano", data=RECORDS, run_dir=tmp_path / "other", **named
    ) as loop:
        for batch in loop:
            loop.step(batch)
            with pytest.raises(ConfigError, match="two runs at a time"):
                optimus_jax.train("gpt2-nano", data=RECORDS, **own, **named)


def test_a_model_is_given_by_its_sizes(tmp_path):
    small = optimus_jax.ModelConfig(
        family="llama",
        vocab_size=257,
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=64,
        max_length=64,
        tied=False,
    )
    layout = {"mesh": "fsdp=4,tensor=2", "global_batch": 8}
    (best, *_) = optimus_jax.find_plans(small, "h100:8", **layout)
    assert str(best.axes) == "fsdp=4,tensor=2"
    assert "32" in str(optimus_jax.show_mesh("fsdp=4,tensor=2", model=small).parameters)
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"(?s)a model is the name.*given: a list"):
        optimus_jax.train([], run_dir=run)
    with pytest.raises(ConfigError, match="its own learning rate"):
        optimus_jax.train(small, run_dir=run, optimizer=optax.sgd(0.1), lr=1.0)
    layout |= {"data": RECORDS, "control": "off"}
    optimus_jax.train(small, run_dir=run, steps=1, eval_every=0, progress="none", **layout)
    assert RunDirectory(run, writer=False).config_text().count('"llama"') == 1
    with pytest.raises(ConfigError, match="a resumed run has its own model"):
        optimus_jax.train(small, run_dir=run, resume=True, steps=2)
    other = replace(small, mlp_dim=128)
    with pytest.raises(ConfigError, match=r"changes to model\.mlp_dim"):
        optimus_jax.train(other, run_dir=run, resume="auto", steps=2, **layout)


@pytest.mark.parametrize(
    "own",
    [
        optax.lion(1e-4),
        optax.sgd(optax.linear_schedule(0.1, 0.0, 100), momentum=0.9, nesterov=True),
        optax.chain(optax.clip(1.0), optax.adamw(1e-3)),
    ],
)
def test_what_treats_every_element_by_itself_is_accepted(own):
    check_elementwise(own)


@pytest.mark.parametrize(
    "own",
    [
        optax.chain(optax.clip_by_global_norm(100.0), optax.adam(1e-3)),
        optax.adafactor(1e-3),
        optax.lamb(1e-3),
        optax.chain(optax.centralize(), optax.sgd(1e-3)),
    ],
)
def test_what_mixes_elements_is_refused(own):
    with pytest.raises(ConfigError, match="mixes elements"):
        check_elementwise(own)


@pytest.mark.parametrize("own", [optax.adagrad(1e-3), optax.adamax(1e-3)])
def test_what_makes_something_of_padding_is_refused(own):
    with pytest.raises(ConfigError, match="is not zero"):
        check_elementwise(own)


def test_what_is_no_transformation_of_gradients_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot update an array"):
        check_elementwise(optax.lbfgs())
    run = {"data": RECORDS, "run_dir": tmp_path / "run", **OPTIONS}
    with pytest.raises(ConfigError, match="a name, or a transformation of optax"):
        optimus_jax.train("gpt2-nano", optimizer=lambda gradient: gradient, **run)
    with pytest.raises(ConfigError, match=r"(?s)its own learning rate.*optimizer.lr=0.1"):
        optimus_jax.train("gpt2-nano", optimizer=optax.sgd(0.1), lr=0.1, **run)
    unused = {"optimizer.beta2": 0.99, "optimizer.min_lr_ratio": 0.0}
    with pytest.raises(ConfigError, match=r"(?s)its own.*beta2=0.99, optimizer.min_lr_ratio=0.0"):
        optimus_jax.train("gpt2-nano", optimizer=optax.sgd(0.1), **run | unused)
    with pytest.raises(ConfigError, match=r"optimizer\.name is given two values"):
        optimus_jax.train("gpt2-nano", optimizer="adamw", **run | {"optimizer.name": "sgd"})
    for wrong in ("no", "runs/other/checkpoints/100", None):
        with pytest.raises(ConfigError, match=r"(?s)resumed or not.*checkpoint\.resume_step"):
            optimus_jax.train("gpt2-nano", resume=wrong, **run)
    assert not (tmp_path / "run").exists()
