"""A preparation that is withdrawn ends before its next program, and only where no other process
waits.
"""

import jax
import pytest

from optimus_jax.config.request import make_config
from optimus_jax.control.preparation import Preparation
from optimus_jax.errors import PlanError
from optimus_jax.mesh.build import discover
from optimus_jax.planning.search.assemble import plan_for


@pytest.fixture
def preparation():
    config = make_config("gpt2-nano", {"mesh": "data=8", "global_batch": 8}, None)
    return Preparation(plan_for(config, config.parallel.axes, discover()))


def work(preparation, done):
    """Compiles three programs; the preparation is withdrawn during the second."""
    preparation.compile(
        lambda: done.append("first"),
        lambda: (preparation.withdraw(), done.append("second")),
        lambda: done.append("third"),
    )


def test_a_withdrawn_preparation_compiles_no_further_program(preparation):
    done = []
    preparation.do(lambda: work(preparation, done))
    assert done == ["first", "second"]
    assert preparation.is_done
    assert "was withdrawn" in preparation.failure
    with pytest.raises(PlanError, match="was withdrawn"):
        preparation.result()


def test_several_processes_prepare_what_is_withdrawn_to_its_end(preparation, monkeypatch):
    """One that has begun may wait for the others."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    done = []
    preparation.do(lambda: work(preparation, done))
    assert done == ["first", "second", "third"]
    preparation = Preparation(preparation.plan)
    preparation.withdraw()
    preparation.do(lambda: work(preparation, done))
    assert len(done) == 6
