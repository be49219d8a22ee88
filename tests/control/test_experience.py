"""The predictor learns step times under the conditions they were measured in."""

import math

import pytest
from fleet import PLANS, PRICING

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
