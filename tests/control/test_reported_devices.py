"""Devices reported as bad in a file, which may contain anything."""

import pytest

from optimus_jax.control.reported_devices import FILE, ReportedDevices


class Reported:
    def __init__(self, directory, *, can_leave=True):
        self.path, self.warnings, self.now_s = directory / FILE, [], 0.0
        self.devices = ReportedDevices(
            directory,
            devices=range(8),
            can_leave=can_leave,
            warn=self.warnings.append,
            clock=lambda: self.now_s,
        )

    def read_after_writing(self, text):
        self.path.write_text(text)
        self.now_s += 1
        return self.devices()


@pytest.fixture
def reported(tmp_path):
    return Reported(tmp_path)


def test_listed_devices_are_lost_until_removed_from_the_list(reported):
    assert reported.devices() == frozenset()
    assert reported.read_after_writing("[3, 7]") == {3, 7}
    assert reported.read_after_writing("[7]") == {7}
    reported.path.unlink()
    reported.now_s += 1
    assert reported.devices() == frozenset()
    assert reported.warnings == []


@pytest.mark.parametrize("text", ["", "3", '{"3": true}', "[3.5]", "[true]", "[3"])
def test_an_invalid_list_is_ignored_with_one_warning(reported, text):
    reported.read_after_writing("[3]")
    for _ in range(3):
        assert reported.read_after_writing(text) == {3}
    assert len(reported.warnings) == 1


def test_unknown_device_ids_are_ignored_with_a_warning(reported):
    assert reported.read_after_writing("[3, 99]") == {3}
    (warning,) = reported.warnings
    assert (
        "names 99, which no device of this run has (they have 0 to 7), and is followed for [3]"
        in warning
    )
    reported.read_after_writing("[3]")
    assert len(reported.warnings) == 1
    reported.read_after_writing("[99]")
    assert len(reported.warnings) == 2, "the same mistake, made again"
    assert "followed" not in reported.warnings[1]


def test_a_run_of_several_processes_is_told_to_resume_instead(tmp_path):
    reported = Reported(tmp_path, can_leave=False)
    assert reported.read_after_writing("[3]") == frozenset()
    (warning,) = reported.warnings
    assert "several processes cannot leave devices" in warning
    assert "--resume" in warning
