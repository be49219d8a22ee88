"""What runs have learnt about their hardware is there for later runs."""

import json
import math

import pytest
from fleet import PLANS, PRICING

from optimus_jax.control import constants
from optimus_jax.control.deciding.regimes import Regimes
from optimus_jax.control.deciding.switch_costs import CostModel
from optimus_jax.control.learnt_file import LearntFile

OLD, NEW = PLANS[:2]
DELAYS = {"delay_log_ratios": {}, "compile_tax_log_ratios": [], "prepare_s": []}


def learners():
    return {"switch_costs": CostModel(), "disturbances_s": Regimes()}


def taught():
    found = learners()
    for delay_s in (40.0, 50.0, 60.0, 70.0):
        found["switch_costs"].learn(
            "remesh", OLD, NEW, PRICING, delay_s=delay_s, compile_tax_s=delay_s
        )
        found["switch_costs"].prepared(2 * delay_s)
    found["disturbances_s"].start(0.0)
    found["disturbances_s"].turn(100.0, 1.0, was_disturbed=False)
    found["disturbances_s"].turn(700.0, 1.0, was_disturbed=True)
    return found


def cost_s(model):
    return model.expected_s("remesh", OLD, NEW, PRICING, compiled=False)


def test_costs_and_disturbances_are_recalled(tmp_path):
    path, before, later = tmp_path / "new" / "learnt.json", taught(), learners()
    unknown_s = cost_s(later["switch_costs"])
    LearntFile(path, before).write()
    LearntFile(path, later).read()
    known_s = cost_s(before["switch_costs"])
    assert abs(cost_s(later["switch_costs"]) - known_s) < 0.2 * abs(unknown_s - known_s)
    assert later["switch_costs"].prepare_s("remesh", compiled=False) == 120.0
    regimes = later["disturbances_s"]
    regimes.start(0.0)
    assert regimes.at(50.0, is_disturbed=False).durations is None, "normal until it has ended once"
    regimes.turn(100.0, 1.0, was_disturbed=False)
    assert list(regimes.at(110.0, is_disturbed=True).durations.past_s) == [600.0]


def test_a_few_of_its_own_switches_outweigh_recalled_ones(tmp_path):
    path, later = tmp_path / "learnt.json", learners()
    LearntFile(path, taught()).write()
    kept = json.loads(path.read_text())["switch_costs"]
    for values in (*kept["delay_log_ratios"].values(), kept["compile_tax_log_ratios"]):
        assert len(values) == constants.MAX_RECALLED_SWITCHES
    LearntFile(path, later).read()
    recalled_s = cost_s(later["switch_costs"])
    for _ in range(2 * constants.MAX_RECALLED_SWITCHES):
        later["switch_costs"].learn("remesh", OLD, NEW, PRICING, delay_s=5.0, compile_tax_s=5.0)
    assert cost_s(later["switch_costs"]) < math.sqrt(10.0 * recalled_s)


def test_what_was_recalled_is_kept_again(tmp_path):
    path, later = tmp_path / "learnt.json", learners()
    LearntFile(path, taught()).write()
    first = path.read_text()
    LearntFile(path, later).read()
    LearntFile(path, later).write()
    assert path.read_text() == first


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("switch_costs", {}),
        ("switch_costs", DELAYS | {"delay_log_ratios": {"remesh": [0.1, "x"]}}),
        ("switch_costs", DELAYS | {"prepare_s": 3.0}),
        ("switch_costs", DELAYS | {"compile_tax_log_ratios": None}),
        ("disturbances_s", {"a": 1}),
        ("disturbances_s", [None]),
    ],
)
def test_a_damaged_part_does_not_count_and_others_do(tmp_path, name, value):
    path, later = tmp_path / "learnt.json", learners()
    LearntFile(path, taught()).write()
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.warns(UserWarning, match="does not count"):
        LearntFile(path, later).read()
    fresh = learners()
    assert later[name].learnt() == fresh[name].learnt()
    other = next(each for each in later if each != name)
    assert later[other].learnt() == taught()[other].learnt()


def test_costs_of_versions_that_measured_no_compiling_apart_are_not_recalled(tmp_path):
    path, later = tmp_path / "learnt.json", learners()
    path.write_text('{"switch_costs": {"log_ratios": {"remesh": [2.0]}, "prepare_s": [9.0]}}')
    LearntFile(path, later).read()
    assert later["switch_costs"].learnt() == CostModel().learnt()


def test_a_missing_file_or_part_is_no_warning(tmp_path):
    LearntFile(tmp_path / "missing.json", learners()).read()
    (tmp_path / "old.json").write_text('{"evidence": []}')
    LearntFile(tmp_path / "old.json", learners()).read()
