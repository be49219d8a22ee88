"""What processes of a run make sure of before they train together."""

import jax
import numpy as np
import pytest

from optimus_jax.errors import ConfigError
from optimus_jax.mesh import distributed
from optimus_jax.mesh.distributed import check_alike


def test_processes_that_differ_are_told_in_what(monkeypatch):
    def everyones(own):
        other = own.copy()
        other[1] ^= 1
        return np.stack([own, own, other])

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", everyones)
    with pytest.raises(ConfigError, match=r"do not agree on the plan\n.*process 2 differs from process 0; here it is data=8"):
        check_alike({"the config": "{}", "the plan": "data=8"})
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", lambda own: np.stack([own] * 3))
    check_alike({"the config": "{}", "the plan": "data=8"})
