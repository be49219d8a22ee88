"""Learning from measured steps."""

from dataclasses import replace

import numpy as np
import pytest

from optimus_jax.planning.calibrate import PRIOR, Calibration, Record, append_record, read_records
from optimus_jax.planning.cost import Prediction, Term


def prediction(**terms_s) -> Prediction:
    time_s = sum(terms_s.values())
    return Prediction(terms=tuple(Term(name=name, time_s=value, how="") for name, value in terms_s.items()), step_time_s=time_s,
                      low_s=time_s / 2, high_s=time_s * 2, bubble=0.0, communication=0.0, tokens_per_s=1000 / time_s, mfu=0.5)


def record(measured_s, **terms_s) -> Record:
    return Record(model="m", plan="p", measured_at="2026-01-01", measured_s=measured_s, terms_s=terms_s)


def test_without_records_nothing_changes():
    assert Calibration.of([]).applied(prediction(compute=1.0)) == prediction(compute=1.0)


def test_the_term_that_is_off_is_found():
    """Compute is right, exchanges take 1.4 times as long: plans with different shares tell."""
    records = [record(1.0 - share + 1.4 * share, compute=1.0 - share, exchange=share) for share in np.linspace(0, 0.8, 9)]
    mended = Calibration.of(records).applied(prediction(compute=0.5, exchange=0.5))
    factors = {term.name: term.time_s / 0.5 for term in mended.terms}
    assert factors["compute"] == pytest.approx(1.0, abs=0.05)
    assert factors["exchange"] == pytest.approx(1.4, abs=0.1)
    assert mended.tokens_per_s == pytest.approx(1000 / mended.step_time_s)
    assert mended.mfu == pytest.approx(0.5 / mended.step_time_s)


def test_shares_are_those_of_the_mended_terms():
    mended = Calibration.of([record(1.6, compute=0.4, fsdp=0.6), record(1.0, compute=1.0)] * 20).applied(prediction(compute=0.5, fsdp=0.4, bubble=0.1))
    times = {term.name: term.time_s for term in mended.terms}
    assert times["fsdp"] > 0.5
    assert mended.communication == pytest.approx(times["fsdp"] / mended.step_time_s)
    assert mended.bubble == pytest.approx(times["bubble"] / mended.step_time_s)


def test_more_records_leave_a_narrower_interval():
    def width(num_records):
        mended = Calibration.of([record(1.2, compute=1.0)] * num_records).applied(prediction(compute=1.0))
        return mended.high_s / mended.low_s

    assert width(1) > width(3) > width(30)
    unseen = Calibration.of([record(1.2, compute=1.0)] * 30).applied(prediction(exchange=1.0))
    assert unseen.step_time_s == 1.0
    assert unseen.high_s >= np.exp(1.6 * PRIOR)


def test_records_survive_the_file_and_damaged_lines_do_not_count(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    assert read_records(path) == []
    for measured_s in (1.0, 2.0):
        append_record(path, record(measured_s, compute=1.0))
    with path.open("a") as file:
        file.write('{"model": "m"}\n{"half\n')
        for measured in ("NaN", "Infinity", "-1.0"):
            file.write(f'{{"model": "m", "plan": "p", "measured_at": "", "measured_s": {measured}, "terms_s": {{"compute": 1.0}}}}\n')
    append_record(path, record(3.0, compute=1.0))
    with pytest.warns(UserWarning, match="is no measurement") as warned:
        found = read_records(path)
    assert found == [record(measured_s, compute=1.0) for measured_s in (1.0, 2.0, 3.0)]
    assert len(warned) == 5


def test_a_record_of_nothing_does_not_count(tmp_path):
    append_record(tmp_path / "r.jsonl", replace(record(0.0, compute=1.0)))
    with pytest.warns(UserWarning, match="is no measurement"):
        assert read_records(tmp_path / "r.jsonl") == []
