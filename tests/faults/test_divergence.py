"""Detection of divergence from losses, without a run."""

import json
import math

import pytest

from optimus_jax.config import Config
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.faults.divergence import (
    PATIENCE_STEPS,
    WINDOW_STEPS,
    LearningHealth,
    learning_error,
    newest,
)
from optimus_jax.run_directory.step_record import StepRecord


def record(step, loss=5.0, grad_norm=1.0, *, loss_scale=None, tokens=10, skipped=None):
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        lr=1e-3,
        tokens=tokens,
        step_time_s=1.0,
        tokens_per_s=1.0,
        mfu=None,
        plan="",
        peak_bytes=None,
        skipped=not finite if skipped is None else skipped,
        loss_scale=loss_scale,
    )


def after(*records):
    learning = LearningHealth()
    for item in records:
        learning.step(item)
    return learning


NAN = math.nan


@pytest.mark.parametrize(
    ("steps", "trouble"),
    [
        ([(5.0, 1.0)] * 2 + [(NAN, NAN)] * 2, None),
        ([(5.0, 1.0)] * 2 + [(NAN, NAN)] * 3, "no update"),
        ([(5.0, 1.0)] * 2 + [(5.0, math.inf)] * 3, "no update"),
        ([(5.0, 1.0)] * 2 + [(5.0, 0.0)] * 3, "no update"),
        ([(NAN, NAN)] * 2 + [(5.0, 1.0)] + [(NAN, NAN)] * 2, None),
    ],
)
def test_consecutive_steps_without_an_update_end_a_run(steps, trouble):
    learning = after(*(record(step, *numbers) for step, numbers in enumerate(steps, 1)))
    assert learning.trouble(3, is_at_end=False) == trouble
    assert learning.trouble(0, is_at_end=False) is None


def test_a_nan_loss_counts_as_no_update():
    assert after(record(1, NAN, 1.0, skipped=False)).skipped == 1


def test_batches_without_counted_tokens_are_no_divergence():
    assert (
        after(*(record(step, 0.0, 0.0, tokens=0) for step in range(1, 9))).trouble(
            3, is_at_end=True
        )
        is None
    )


def test_loss_scale_search_does_not_count_until_the_minimum():
    falling = [record(step, 5.0, math.inf, loss_scale=2.0 ** (10 - step)) for step in range(1, 10)]
    learning = after(*falling)
    assert (learning.skipped, learning.first_skipped) == (0, 1)
    for step in range(10, 13):
        learning.step(record(step, 5.0, math.inf, loss_scale=1.0))
    assert learning.trouble(3, is_at_end=False) == "no update"


def test_the_error_suggests_a_checkpoint_before_the_divergence():
    """The state after step 4 failed in steps 5 to 7, so the last state known to be good is that
    after step 3.
    """
    learning = after(
        *(record(step) for step in range(1, 5)), *(record(step, NAN, NAN) for step in range(5, 8))
    )
    assert (learning.good_limit, sorted(learning.limits)) == (3, [3, 4])
    text = str(
        learning_error(
            learning,
            "no update",
            Config().with_values({"optimizer.clip_norm": 0.0}),
            [2, 4, 5, 6],
            step=7,
            last=record(7, NAN, NAN),
            lr=0.3,
            usual_lr=0.2,
        )
    )
    assert "no update in 3 step(s) in a row, since step 5" in text
    assert "checkpoint of step 2" in text
    assert "checkpoint.resume_step=2" in text
    assert "--lr 0.1 (it is 0.3)" in text
    assert "clip_norm=1" in text
    never = after(*(record(step, NAN, NAN) for step in range(1, 4)))
    of_sgd = Config().with_values({"optimizer.name": "sgd"})
    assert "--lr 0.1 (it is 0.3)" in str(
        learning_error(never, "no update", of_sgd, [], step=3, last=None, lr=0.3, usual_lr=None)
    )
    own = Config().with_values({"optimizer.name": IN_PYTHON})
    told = str(learning_error(never, "no update", own, [], step=3, last=None, lr=1, usual_lr=None))
    assert "--lr" not in told
    assert "warmup" not in told
    assert "begin a new run: there is no checkpoint" in str(
        learning_error(never, "no update", Config(), [], step=3, last=None, lr=0.3, usual_lr=0.2)
    )


@pytest.mark.parametrize(
    ("learning", "trouble"),
    [
        (LearningHealth(good=9, bad_evaluations=1), "evaluation"),
        (LearningHealth(good=9, skipped=1, first_skipped=10), None),
        (LearningHealth(good=9, skipped=2, first_skipped=9), "no update"),
        (LearningHealth(skipped=1, first_skipped=1), "no update"),
        (LearningHealth(broken="params/w"), "weights"),
        (LearningHealth(good=9), None),
    ],
)
def test_at_its_end_a_run_is_checked_for_divergence(learning, trouble):
    assert learning.trouble(5, is_at_end=True) == trouble


def test_a_single_non_finite_evaluation_is_tolerated():
    learning = LearningHealth(good=30)
    learning.evaluation(10, 4.0)
    learning.evaluation(20, NAN)
    assert (learning.trouble(5, is_at_end=False), learning.good_limit) == (None, 10)
    learning.evaluation(30, math.inf)
    assert learning.trouble(5, is_at_end=False) == "evaluation"


def test_a_loss_far_above_its_minimum_is_reported_once_per_episode():
    learning, reports = LearningHealth(), []
    for step in range(1, 161):
        high = 31 <= step <= 80 or 111 <= step <= 113 or step >= 121
        learning.step(record(step, 9.0 if high else 3.0 + 0.2 * (step % 3)))
        if learning.rises(step, 0.25):
            reports.append((step, learning.good_limit))
    (first, before), (second, _) = reports
    assert 31 + PATIENCE_STEPS <= first <= 31 + PATIENCE_STEPS + WINDOW_STEPS
    assert before < 31
    assert second >= 121 + PATIENCE_STEPS
    assert not any(LearningHealth().rises(step, 0.25) for step in range(3))


def test_the_divergence_state_is_restored_from_a_checkpoint():
    learning = after(record(1), record(2), record(3, NAN, NAN))
    learning.rises(3, 0.25)
    again = LearningHealth.from_json(json.loads(json.dumps(learning.to_json())))
    assert (again.skipped, again.first_skipped, again.good, again.best) == (1, 3, 1, 5.0)
    assert LearningHealth.from_json(None) == LearningHealth()
    assert LearningHealth.from_json({"unheard of": 1}) == LearningHealth()


def test_newest_step_up_to_a_limit():
    assert (newest([1, 5, 9], 6), newest([5], 4)) == (5, None)
