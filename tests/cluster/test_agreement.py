"""Checks that processes of a run agree before they train together."""

from contextlib import suppress

import jax
import numpy as np
import pytest

from optimus_jax.cluster import distributed
from optimus_jax.cluster.distributed import (
    Agreement,
    all_or_none,
    assert_same_everywhere,
    broadcast_from_0,
    called_alone,
    gather_from_all,
    is_peer_failure,
)
from optimus_jax.errors import ConfigError, DataError, FaultError, OptimusError


def test_differing_processes_are_told_what_differs(monkeypatch):
    def gather_with_a_difference(own):
        other = own.copy()
        other[1] ^= 1
        return np.stack([own, own, other])

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gather_with_a_difference)
    with pytest.raises(
        ConfigError,
        match=r"do not agree on the plan\n.*process 2 differs from process 0; here it is data=8",
    ) as caught:
        assert_same_everywhere({"the config": "{}", "the plan": "data=8"})
    assert caught.value.raised_by_all_processes
    with pytest.raises(FaultError, match="do not agree on the plan"):
        assert_same_everywhere({"the config": "{}", "the plan": "data=8"}, is_transient=True)
    monkeypatch.setattr(
        distributed.multihost_utils, "process_allgather", lambda own: np.stack([own] * 3)
    )
    assert_same_everywhere({"the config": "{}", "the plan": "data=8"})


@pytest.mark.parametrize(
    ("own_error", "other_error", "raised", "raised_by_all_processes"),
    [
        (None, None, None, None),
        (DataError("no file"), None, DataError, True),
        (None, DataError("no file"), OptimusError, True),
        (ValueError("a mistake of ours"), None, ValueError, None),
        (None, ValueError("a mistake of ours"), FaultError, None),
        (DataError("no file"), ValueError("a mistake of ours"), DataError, False),
    ],
)
def test_an_error_of_one_process_is_raised_by_all(
    monkeypatch, own_error, other_error, raised, raised_by_all_processes
):
    """Only a process that knows that all have an error which a user can fix may exit in order and
    wait for the others.
    """

    def outcome_of(error):
        gathered = []
        monkeypatch.setattr(
            distributed.multihost_utils,
            "process_allgather",
            lambda own: gathered.append(own) or np.stack([own] * 2),
        )
        with suppress(Exception), all_or_none():
            if error is not None:
                raise error
        return gathered[0]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    other = outcome_of(other_error)
    monkeypatch.setattr(
        distributed.multihost_utils, "process_allgather", lambda own: np.stack([own, other])
    )
    caught = None
    try:
        with all_or_none():
            if own_error is not None:
                raise own_error
    except Exception as error:
        caught = error
    assert type(caught) is (raised or type(None))
    assert getattr(caught, "raised_by_all_processes", None) == raised_by_all_processes
    if own_error is None and other_error is not None:
        assert "given: process 1 of 2" in str(caught)


def test_one_process_alone_does_not_wait_for_the_others(monkeypatch):
    with called_alone("Samples"):
        assert gather_from_all(1) == [1], "there is one process"
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        for together in (lambda: gather_from_all(1), lambda: broadcast_from_0("a")):
            with pytest.raises(ConfigError, match=r"(?s)all processes.*Samples, in process 0"):
                together()


def test_the_largest_of_each_number_is_agreed_on():
    """Each device brings its process's numbers; here all are of one process."""
    agree = Agreement(jax.make_mesh((8,), ("data",)))
    assert np.asarray(agree(2, 1500)).tolist() == [2, 1500]
    assert np.asarray(agree(0, 0)).tolist() == [0, 0]


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset"), True),
        (
            caused(
                TimeoutError("barrier"), jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset")
            ),
            True,
        ),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (TimeoutError("a file server"), False),
        (
            ValueError(
                "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547]"
                " Connection closed by peer [127.0.0.1]:55471"
            ),
            True,
        ),
        (
            caused(
                TimeoutError("a save"),
                ValueError("INTERNAL: NCCL operation ncclAllGather failed: remote error"),
            ),
            True,
        ),
        (ValueError("UNKNOWN: Error writing a file"), False),
        (ValueError("Gloo is no word of a status"), False),
        (
            caused(
                DataError("no file"), jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset")
            ),
            False,
        ),
    ],
)
def test_errors_from_the_loss_of_another_process_are_recognised(error, expected):
    assert is_peer_failure(error) is expected
