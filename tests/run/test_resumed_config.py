"""Values derived at the start of a run are kept by a resume, unless that very setting changes."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from optimus_jax.config import Config, OptimizerConfig
from optimus_jax.config.request import make_config, named_settings, repeated_config, resumed_config
from optimus_jax.config.settings import setting_names
from optimus_jax.errors import ConfigError
from optimus_jax.run.learning_rate_change import RateChange
from optimus_jax.run.resumed_config import ResumedConfig, derived_values
from optimus_jax.training.optimizer import learning_rate

NUM_PARAMS = 33_000
PEAK = 2e-3


def started(**settings):
    """The config.json of a started run."""
    return written(make_config("gpt2-nano", settings))


def written(requested, config=None):
    return requested.to_json(
        derived=derived_values(config or requested, num_params=NUM_PARAMS, precision="f32")
    )


def resume(text: str, step: int, *, auto: bool = False, **settings: Any) -> ResumedConfig:
    """A run resumed after a step, by `--resume` or by a whole command with `--resume auto`."""
    requested = (
        repeated_config(text, make_config("gpt2-nano", settings))
        if auto
        else resumed_config(text, None, settings)
    )
    return ResumedConfig.of(text, requested, named_settings(settings), None).from_step(step)


def text_of(resumed):
    """The config.json after the resume."""
    return written(resumed.as_requested(resumed.config), resumed.config)


def rates(config, first, last):
    return np.array(
        [learning_rate(config, NUM_PARAMS)(jnp.int32(step)) for step in range(first, last + 1)]
    )


def change(resumed, step, checkpoints=()):
    return RateChange(
        before=resumed.before,
        now=resumed.config,
        num_params=NUM_PARAMS,
        step=step,
        checkpoints=checkpoints,
    )


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_an_extended_run_does_not_warm_up_again(schedule, auto):
    """Extended twice: warm-up and decay stay as at the start, and the learning rate has no jump."""
    words = {"optimizer.schedule": schedule} if auto else {}
    text = started(steps=10, **{"optimizer.schedule": schedule})
    for step, steps in ((10, 400), (400, 900)):
        resumed = resume(text, step, auto=auto, steps=steps, **words)
        assert (resumed.config.warmup_steps, resumed.config.decay_steps, resumed.config.steps) == (
            1,
            10,
            steps,
        )
        assert rates(resumed.config, step, step + 1) == pytest.approx(0.1 * PEAK)
        text = text_of(resumed)
        assert json.loads(text)["optimizer"]["warmup_steps"] is None, (
            "another run that is begun from it derives its own"
        )


def test_a_decay_that_has_not_begun_ends_at_the_new_last_step():
    for settings, step, warmup in (
        ({"optimizer.schedule": "wsd"}, 800, 50),
        ({"optimizer.schedule": "constant"}, 999, 50),
        ({}, 20, 50),
    ):
        resumed = resume(started(steps=1000, **settings), step, steps=3000)
        assert (resumed.config.warmup_steps, resumed.config.decay_steps) == (warmup, 3000)
        assert np.array_equal(rates(resumed.before, step, step), rates(resumed.config, step, step))
        again = resume(text_of(resumed), step)
        assert again.config == resumed.config, "a restart changes nothing"
        assert not change(again, step).is_changed


@pytest.mark.parametrize(("step", "steps"), [(801, 3000), (900, 850), (700, 750)])
def test_a_decay_that_has_begun_keeps_its_end(step, steps):
    """For longer and shorter runs; in the last case the step is before its decay, but within the
    decay of the shorter run.
    """
    resumed = resume(started(steps=1000, **{"optimizer.schedule": "wsd"}), step, steps=steps)
    assert resumed.config.decay_steps == 1000
    text = change(resumed, step).describe()
    assert "the rate jumps" not in text
    assert f"steps 1000 -> {steps}" in text
    assert f"--set optimizer.decay_steps={steps} (" in text


def test_a_run_shorter_than_its_warmup_does_not_warm_up_again():
    text = started(steps=10, **{"optimizer.warmup_steps": 100})
    resumed = resume(text, 10, steps=400)
    assert rates(resumed.config, 10, 11) == pytest.approx(PEAK, rel=1e-3)
    assert resumed.config.decay_steps == 400, "no step has been part of the decay"
    assert resume(text_of(resumed), 400, steps=500).config.warmup_steps == 10
    shortened = resume(started(steps=1000), 20, steps=30)
    assert (shortened.config.warmup_steps, shortened.config.decay_steps) == (50, 1000)


@pytest.mark.parametrize(
    ("settings", "step", "changed", "now"),
    [
        ({"lr": 1e-3}, 50, "optimizer.lr 0.002 -> 0.001", None),
        ({"optimizer.schedule": "constant"}, 50, "optimizer.schedule cosine -> constant", PEAK),
        (
            {"optimizer.schedule": "wsd", "steps": 1000},
            100,
            "optimizer.decay_steps 100 -> 1000",
            PEAK,
        ),
        (
            {"optimizer.decay_steps": 400, "steps": 400},
            100,
            "optimizer.decay_steps 100 -> 400",
            None,
        ),
        ({"optimizer.warmup_steps": 80}, 50, "optimizer.warmup_steps 5 -> 80", PEAK * 51 / 80),
        ({"optimizer.min_lr_ratio": 0.5}, 50, "optimizer.min_lr_ratio 0.1 -> 0.5", None),
        (
            {"optimizer.warmup_steps": "none", "steps": 2000},
            50,
            "optimizer.warmup_steps 5 -> 100",
            PEAK * 51 / 100,
        ),
    ],
)
def test_a_change_of_the_learning_rate_is_reported(settings, step, changed, now):
    """The rates before, now and at the end, as the steps will have them."""
    resumed = resume(started(steps=100), step, **settings)
    reported = change(resumed, step)
    expected = [
        rates(resumed.before, step, step),
        rates(resumed.config, step + 1, step + 1),
        rates(resumed.config, resumed.config.steps, resumed.config.steps),
    ]
    assert list(reported.rates.values()) == [pytest.approx(float(rate[0])) for rate in expected]
    if now is not None:
        assert reported.rates["lr_now"] == pytest.approx(now)
    text = reported.describe()
    assert changed in text
    assert "the rate jumps" in text
    assert all(f"{rate:.4g}" in text for rate in reported.rates.values())


@pytest.mark.parametrize(
    ("settings", "steps", "checkpoints", "back"),
    [
        ({"optimizer.schedule": "wsd"}, 3000, (400, 800, 900, 1000), 800),
        ({"optimizer.schedule": "wsd"}, 3000, (500, 1000), 500),
        ({"optimizer.schedule": "wsd"}, 3000, (801, 900, 1000), None),
        ({"optimizer.schedule": "wsd"}, 3000, (), None),
        ({"optimizer.schedule": "wsd", "optimizer.decay_steps": 500}, 3000, (400, 401), 400),
        ({}, 3000, (50, 1000), 50),
        ({"optimizer.schedule": "linear"}, 3000, (51, 1000), None),
        ({"optimizer.schedule": "wsd", "optimizer.decay_fraction": 1.0}, 3000, (50, 60), 50),
    ],
)
def test_after_its_decay_a_run_is_told_which_checkpoint_extends_it(
    settings, steps, checkpoints, back
):
    """And the suggested command extends the run without a jump, before and after the first
    resume.
    """
    text = started(steps=1000, **settings)
    resumed = resume(text, 1000, steps=steps)
    reported = change(resumed, 1000, checkpoints).describe()
    if back is None:
        assert "no checkpoint of step" in reported
        assert "checkpoint.resume_step" not in reported
        return
    assert (
        f"--resume --set checkpoint.resume_step={back} --set optimizer.decay_steps=none" in reported
    )
    typed: dict[str, Any] = {"optimizer.decay_steps": "none"}
    for again in (
        resume(text_of(resumed), back, **typed),
        resume(text, back, steps=steps, **typed),
    ):
        assert again.config.decay_steps == steps
        assert "the rate jumps" not in change(again, back).describe()
        later = resume(text_of(again), back, steps=2 * steps)
        assert later.config.decay_steps == 2 * steps, "it can be extended once more"


def test_no_checkpoint_is_suggested_where_no_decay_was_done():
    """Before the decay begins, without a decay, and where the run is shorter than its warm-up."""
    for settings, step, steps in (
        ({"optimizer.schedule": "wsd"}, 700, 3000),
        ({"optimizer.schedule": "constant"}, 1000, 3000),
        ({"optimizer.warmup_steps": 500}, 20, 30),
    ):
        resumed = resume(started(steps=1000, **settings), step, steps=steps)
        assert "go back" not in change(resumed, step, (5, 500, 1000)).describe()


OTHER: dict[str, Any] = {
    "lr": 1e-3,
    "schedule": "linear",
    "warmup_steps": 40,
    "decay_steps": 90,
    "min_lr_ratio": 0.4,
    "decay_fraction": 0.9,
}


@pytest.mark.parametrize(("schedule", "step"), [("cosine", 3), ("wsd", 95), ("constant", 100)])
def test_every_jump_of_the_learning_rate_is_reported(schedule, step):
    """For all settings of the optimizer, and the number of steps."""
    text = started(steps=100, **{"optimizer.schedule": schedule})
    tried: list[dict[str, Any]] = [{"steps": 200}, {"steps": 101}]
    whole = {field.name for field in dataclasses.fields(OptimizerConfig) if field.type is int}
    for name in setting_names(OptimizerConfig):
        if name == "name":  # fixed for a run
            continue
        value = OTHER.get(name, 7 if name in whole else 0.5)
        tried += [{f"optimizer.{name}": value}, {f"optimizer.{name}": value, "steps": 200}]
    for settings in tried:
        resumed = resume(text, step, **settings)
        reported = change(resumed, step)
        at = jnp.arange(step, 202, dtype=jnp.int32)
        both = [learning_rate(each, NUM_PARAMS)(at) for each in (resumed.before, resumed.config)]
        old, new = np.array(both)[:, 1:]
        if not np.array_equal(old, new):
            assert reported.is_changed, settings
        was = float(both[0][0])
        if all(new[0] != pytest.approx(other, rel=2e-3) for other in (old[0], was)):
            assert "the rate jumps" in reported.describe(), settings


def test_a_new_warmup_may_be_longer_than_the_old_decay():
    changes: dict[str, Any]
    for changes in (
        {"steps": 400, "optimizer.warmup_steps": 200},
        {"steps": 4000, "optimizer.warmup_steps": "none"},
    ):
        resumed = resume(started(steps=100), 50, **changes)
        ends = resumed.config.warmup_steps, resumed.config.decay_steps
        assert ends == (200, changes["steps"])
    changes = {"optimizer.decay_steps": 100, "optimizer.warmup_steps": 200}
    with pytest.raises(ConfigError, match=r"before warm-up does\n.*decay_steps=100, .*=200"):
        resume(started(steps=100), 50, **changes)


def test_a_resume_without_changes_derives_nothing_anew():
    """Even if this version derives another peak rate or number of warm-up steps."""
    text = started(steps=300)
    value = json.loads(text)
    value["derived"] |= {
        "optimizer.lr": 0.125,
        "optimizer.warmup_steps": 7,
        "evaluation.examples": 5,
        "data.seq_len": 64,
        "precision.compute": "bf16",
    }
    text = json.dumps(value)
    for auto in (True, False):
        resumed = resume(text, 50, auto=auto)
        config = resumed.config
        assert (config.optimizer.lr, config.warmup_steps, config.eval_examples) == (0.125, 7, 5)
        assert (config.seq_len, config.eval_seq_len, config.precision.compute) == (64, 256, "bf16")
        assert not change(resumed, 50).is_changed
        assert Config.from_json(text_of(resumed)) == Config.from_json(text)
    assert resume(text, 50, lr=0.5, precision="f32").config.precision.compute == "f32"
    assert resume(text, 50, precision="auto").config.precision.compute == "auto"


def test_a_setting_left_out_of_a_repeated_command_is_kept():
    text = started(lr=0.5, **{"evaluation.examples": 7})
    config = resume(text, 50, auto=True).config
    assert (config.optimizer.lr, config.eval_examples) == (0.5, 7)
    assert resume(text, 50, auto=True, lr=0.25).config.optimizer.lr == 0.25
    edited = text.replace('"lr": 0.5', '"lr": 0.75', 1)
    assert resume(edited, 50).config.optimizer.lr == 0.75, (
        "who edits the file has changed that very setting"
    )


def test_a_run_from_before_derived_values_were_recorded_keeps_its_values():
    value = json.loads(
        make_config("gpt2-nano", {"steps": 10, "global_batch": 8}).to_json(
            derived={"optimizer.lr": 0.002, "optimizer.warmup_steps": 1}
        )
    )
    del value["evaluation"], value["optimizer"]["decay_steps"]
    value["eval_batches"] = 8
    for derived in (True, False):
        if not derived:
            del value["derived"]
        config = resume(json.dumps(value), 10, steps=400).config
        assert (config.warmup_steps, config.decay_steps, config.eval_examples) == (1, 10, 64)


def test_a_derived_sequence_length_may_be_given_but_not_changed():
    text = started()
    for auto in (True, False):
        assert resume(text, 5, auto=auto, seq_len=256).config.seq_len == 256
        with pytest.raises(ConfigError, match=r"data\.seq_len"):
            resume(text, 5, auto=auto, seq_len=128)


@pytest.mark.parametrize(
    "derived", ["[]", '{"optimizer.warmup_steps": "soon"}', '{"optimizer.decay_steps": 0}']
)
def test_invalid_derived_values_are_refused(derived):
    value = json.loads(started()) | {"derived": json.loads(derived)}
    with pytest.raises(ConfigError, match="do: "):
        resume(json.dumps(value), 5)


def test_eval_batches_is_an_old_name_of_evaluation_examples():
    config = make_config("gpt2-nano", {"eval_batches": 3, "global_batch": 4, "phases": "5:16x32"})
    assert config.eval_examples == 12
    assert make_config(None, {"evaluation.examples": 5}, config).eval_examples == 5
    assert make_config("gpt2-nano", {"global_batch": 64}).eval_examples == 128
    text = started(**{"evaluation.examples": 5, "global_batch": 4})
    assert resume(text, 5, eval_batches=3).config.eval_examples == 12
    with pytest.raises(ConfigError, match=r"old name(.|\n)*give evaluation.examples only"):
        make_config("gpt2-nano", {"eval_batches": 3, "evaluation.examples": 5})
