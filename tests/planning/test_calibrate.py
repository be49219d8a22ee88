"""Predictions are calibrated with the times of measured steps."""

import math
from dataclasses import replace

import numpy as np
import pytest

from optimus_jax.planning.cost.cost import NINE_IN_TEN, Prediction, Term
from optimus_jax.planning.learning.calibrate import LINKS
from optimus_jax.planning.learning.records import (
    Record,
    append_record,
    calibration_of,
    read_records,
)


def prediction(**terms_s) -> Prediction:
    time_s = sum(terms_s.values())
    return Prediction(
        terms=tuple(Term(name=name, time_s=value, how="") for name, value in terms_s.items()),
        step_time_s=time_s,
        low_s=time_s / 2,
        high_s=time_s * 2,
        bubble=0.0,
        communication=0.0,
        tokens_per_s=1000 / time_s,
        mfu=0.5,
    )


def record(measured_s, plan="p", **terms_s) -> Record:
    return Record(
        model="m", plan=plan, measured_at="2026-01-01", measured_s=measured_s, terms_s=terms_s
    )


def test_no_records_leave_the_prediction_unchanged():
    assert calibration_of([]).applied(prediction(compute=1.0)) == prediction(compute=1.0)


def test_calibration_finds_the_mispredicted_term():
    """Compute is predicted right and fsdp takes 1.4 times as long: plans with different shares of
    them tell the two apart.
    """
    records = [
        record(1.0 - share + 1.4 * share, plan=f"{share}", compute=1.0 - share, fsdp=share)
        for share in np.linspace(0, 0.8, 9)
    ]
    corrected = calibration_of(records).applied(prediction(compute=0.5, fsdp=0.5))
    factors = {term.name: term.time_s / 0.5 for term in corrected.terms}
    assert factors["compute"] == pytest.approx(1.0, abs=0.05)
    assert factors["fsdp"] == pytest.approx(1.4, abs=0.1)
    assert corrected.tokens_per_s == pytest.approx(1000 / corrected.step_time_s)
    assert corrected.mfu == pytest.approx(0.5 / corrected.step_time_s)


def test_communication_and_bubble_shares_use_corrected_terms():
    corrected = calibration_of(
        [record(1.6, plan="a", compute=0.4, fsdp=0.6), record(1.0, plan="b", compute=1.0)]
    ).applied(prediction(compute=0.5, fsdp=0.4, bubble=0.1))
    times = {term.name: term.time_s for term in corrected.terms}
    assert times["fsdp"] > 0.5
    assert corrected.communication == pytest.approx(times["fsdp"] / corrected.step_time_s)
    assert corrected.bubble == pytest.approx(times["bubble"] / corrected.step_time_s)


def width(records: list[Record], **terms_s) -> float:
    corrected = calibration_of(records).applied(prediction(**terms_s))
    return corrected.high_s / corrected.low_s


def test_records_of_more_plans_narrow_the_interval():
    def plans(count):
        return [record(1.2, plan=f"{number}", compute=1.0) for number in range(count)]

    assert (
        width(plans(1), compute=1.0) > width(plans(3), compute=1.0) > width(plans(30), compute=1.0)
    )


def test_repeated_records_of_a_plan_do_not_narrow_the_interval():
    """An error peculiar to one plan is the same in all its records."""
    once = [record(1.2, compute=1.0)]
    assert width(once * 30, compute=1.0) == pytest.approx(width(once, compute=1.0))


def test_unmeasured_term_is_corrected_by_the_shared_factor():
    """Other jobs on the machine slow every term down; the error of the link alone is still unknown,
    so the interval stays wide.
    """
    records = [record(1.2, plan=f"{number}", compute=1.0) for number in range(30)]
    unseen = calibration_of(records).applied(prediction(fsdp=1.0))
    assert 1.05 < unseen.step_time_s < 1.15
    assert unseen.high_s / unseen.step_time_s > math.exp(NINE_IN_TEN * LINKS)
    assert calibration_of(records).step_time_s({"fsdp": 1.0}) == pytest.approx(unseen.step_time_s)


def test_communication_terms_share_a_correction():
    """A link that was slow for fsdp is taken to be slow for tensor; compute terms do not change."""
    records = [
        record(1.0 + share, plan=f"{share}", compute=1.0 - share, fsdp=share)
        for share in np.linspace(0, 0.8, 9)
    ]
    factors = calibration_of(records).covering(["compute", "fsdp", "tensor", "recompute"]).factors
    assert factors["tensor"] > 1.5
    assert factors["recompute"] == pytest.approx(1.0, abs=0.15)


def test_records_survive_the_file_and_damaged_lines_are_skipped(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    assert read_records(path) == []
    for measured_s in (1.0, 2.0):
        append_record(path, record(measured_s, compute=1.0))
    with path.open("a") as file:
        file.write('{"model": "m"}\n{"half\n')
        for measured in ("NaN", "Infinity", "-1.0"):
            file.write(
                f'{{"model": "m", "plan": "p", "measured_at": "", "measured_s": {measured},'
                ' "terms_s": {"compute": 1.0}}\n'
            )
    append_record(path, record(3.0, compute=1.0))
    with pytest.warns(UserWarning, match="is no measurement") as warned:
        found = read_records(path)
    assert found == [record(measured_s, compute=1.0) for measured_s in (1.0, 2.0, 3.0)]
    assert len(warned) == 5


def test_record_of_zero_seconds_is_skipped(tmp_path):
    append_record(tmp_path / "r.jsonl", replace(record(0.0, compute=1.0)))
    with pytest.warns(UserWarning, match="is no measurement"):
        assert read_records(tmp_path / "r.jsonl") == []
