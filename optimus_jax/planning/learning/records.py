"""Store measured step times with their predictions as JSON Lines, and calibrate from them."""

import dataclasses
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimus_jax.config.settings import with_right_types
from optimus_jax.planning.learning.beliefs import Beliefs, Evidence, Query
from optimus_jax.planning.learning.calibrate import NOISE, Calibration
from optimus_jax.system.json_input import parse_json

MAX_RECORDS = 500
"""Maximum number of records that are read, the newest ones."""
MAX_CALIBRATING = 100
"""Maximum number of predictions that are used for calibration, the newest ones."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Predicted and measured step time of one plan."""

    model: str
    plan: str
    """Digest of the plan."""
    measured_at: str
    """Date and time of the measurement."""
    measured_s: float
    """Measured seconds per step."""
    terms_s: dict[str, float]
    """Predicted seconds of each term, without calibration."""

    @property
    def predicted_s(self) -> float:
        """Predicted seconds per step, without calibration."""
        return sum(self.terms_s.values())


def calibration_of(records: Sequence[Record]) -> Calibration:
    """The calibration from records of the same devices; empty without records."""
    logs: dict[tuple[str, tuple[tuple[str, float], ...]], list[float]] = {}
    for record in records:
        key = (f"{record.plan} of {record.model}", tuple(sorted(record.terms_s.items())))
        logs[key] = [*logs.pop(key, []), math.log(record.measured_s)]
    # All measurements of a plan share the error specific to that plan, so they count as one.
    evidence = [
        Evidence(
            query=Query(plan=plan, setting=f"{number}", terms_s=dict(terms_s)),
            log_time=sum(times) / len(times),
            deviation=NOISE,
        )
        for number, ((plan, terms_s), times) in enumerate(logs.items())
    ][-MAX_CALIBRATING:]
    return Beliefs.given(evidence, Calibration()).calibration


def read_records(path: Path) -> list[Record]:
    """The newest records of a file; empty if there is no file. Invalid lines cause a warning."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        warnings.warn(
            f"earlier measurements cannot be read and do not count: {error}", stacklevel=2
        )
        return []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = with_right_types(Record(**parse_json(line)))
            if (
                not 0 < record.measured_s < math.inf
                or not 0 < record.predicted_s < math.inf
                or min(record.terms_s.values()) < 0
            ):
                raise ValueError("times are finite and above 0")
            records.append(record)
        except (ValueError, TypeError, AttributeError) as error:
            warnings.warn(
                f"{path}, line {number} is no measurement and does not count: {error}", stacklevel=2
            )
    return records[-MAX_RECORDS:]


def append_record(path: Path, record: Record) -> None:
    """Append one line. A failure only causes a warning, since a run does not depend on it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")
    except OSError as error:
        warnings.warn(f"a measurement cannot be kept for later runs: {error}", stacklevel=2)
