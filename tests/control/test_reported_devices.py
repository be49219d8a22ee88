"""Devices that somebody reports to be bad, in a file that anybody may write anything into."""

import pytest

from optimus_jax.control.reported_devices import FILE, ReportedDevices


class Reported:
    def __init__(self, directory, *, can_leave=True):
        self.path, self.told, self.now_s = directory / FILE, [], 0.0
        self.devices = ReportedDevices(
            directory,
            devices=range(8),
            can_leave=can_leave,
            warn=self.told.append,
            clock=lambda: self.now_s,
        )

    def says(self, text):
        self.path.write_text(text)
        self.now_s += 1
        return self.devices()


@pytest.fixture
def reported(tmp_path):
    return Reported(tmp_path)


def test_what_is_listed_is_not_used_until_it_is_taken_out(reported):
    assert reported.devices() == frozenset()
    assert reported.says("[3, 7]") == {3, 7}
    assert reported.says("[7]") == {7}
    reported.path.unlink()
    reported.now_s += 1
    assert reported.devices() == frozenset()
    assert reported.told == []


@pytest.mark.parametrize("text", ["", "3", '{"3": true}', "[3.5]", "[true]", "[3"])
def test_what_is_no_list_changes_nothing_and_is_told_once(reported, text):
    reported.says("[3]")
    for _ in range(3):
        assert reported.says(text) == {3}
    assert len(reported.told) == 1


def test_a_device_that_nobody_has_is_told_and_left_out(reported):
    assert reported.says("[3, 99]") == {3}
    (told,) = reported.told
    assert (
        "names 99, which no device of this run has (they have 0 to 7), and is followed for [3]"
        in told
    )
    reported.says("[3]")
    assert len(reported.told) == 1
    reported.says("[99]")
    assert len(reported.told) == 2, "the same mistake, made again"
    assert "followed" not in reported.told[1]


def test_a_run_that_cannot_do_without_devices_says_what_to_do(tmp_path):
    reported = Reported(tmp_path, can_leave=False)
    assert reported.says("[3]") == frozenset()
    (told,) = reported.told
    assert "several processes cannot leave devices" in told
    assert "--resume" in told
