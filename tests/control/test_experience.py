"""The predictor learns step times under the conditions they were measured in, and few steps do not
outweigh many.
"""

import math

import pytest
from fleet import PLANS, PRICING

from optimus_jax.control import constants
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.experience import Experience, Known
from optimus_jax.control.deciding.prices import Prices
from optimus_jax.control.predictor import Predictor
from optimus_jax.data.batch import BatchShape

BATCH = BatchShape(512, 4096)
NORMAL = Known(plan=PLANS[0], batch=BATCH, conditions=Conditions(), regime=0)


def learnt(*levels):
    """Step time in seconds that the predictor has learnt for NORMAL, after levels of these
    (seconds, number of steps).
    """
    predictor = Predictor()
    experience = Experience(predictor, Prices(PRICING))
    for step, (time_s, count) in enumerate(levels):
        experience.learn(NORMAL, (math.log(time_s), 0.01, count), step)
    (evidence,) = predictor.evidence
    return math.exp(evidence.log_time)


def test_a_newer_level_replaces_the_one_before():
    assert learnt((3.0, 30), (3.3, 10)) == pytest.approx(3.3)
    assert learnt((3.0, 30), (3.3, 10), (3.1, 10)) == pytest.approx(3.1)


def test_a_few_contradicting_steps_are_ignored():
    """Such steps were done in other conditions, and carry this name because a reading is newer than
    they are. If they counted, any other plan would look better.
    """
    assert learnt((3.0, 30), (8.0, 10)) == pytest.approx(3.0)


def test_many_contradicting_steps_are_believed():
    assert learnt(
        (3.0, 60), (8.0, constants.MIN_OVERRULING_STEPS - 1), (8.0, constants.MIN_OVERRULING_STEPS)
    ) == pytest.approx(8.0)
    assert learnt((8.0, 10), (3.0, 12)) == pytest.approx(3.0), "what was known was known from fewer"
