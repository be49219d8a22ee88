"""The arithmetic of a step has not changed: ten losses at full precision, for a GPT and a Llama."""

import json

import pytest
from golden.make import MODELS, STEPS, golden_file, golden_losses
from helpers import GOLDEN


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_the_golden_ones(model):
    golden = [tuple(pair) for pair in json.loads(golden_file(model).read_text())["losses"]]
    losses = golden_losses(model)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert losses == [(step, pytest.approx(loss, rel=GOLDEN)) for step, loss in golden]
    assert golden[-1][1] < 0.9 * golden[0][1], (
        "ten steps that learn nothing would not see a broken update"
    )
