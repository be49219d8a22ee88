"""A phase gets the plan of the one before it, as far as its batches allow."""

from dataclasses import replace

import pytest
from plans import LLAMA, case, make_config, make_plan

from optimus_jax.config.axes import AxisSizes
from optimus_jax.errors import PlanError
from optimus_jax.mesh.build import discover
from optimus_jax.planning.search import phase_plans
from optimus_jax.planning.search.phase_plans import plans_ahead

TOPOLOGY = discover()


def later_plans(text, chosen, *, topology=TOPOLOGY, **settings):
    """Plans of the phases after the first, and that of the first."""
    config = make_config(
        replace(LLAMA, num_layers=4),
        chosen,
        {"data.phases": text, "data.global_batch": 16, **settings},
    )
    plan = make_plan(config)
    return [each for _, each in plans_ahead(config, plan, 0, topology, lambda _: None)], plan


def test_next_phase_keeps_a_plan_that_fits_its_batches():
    found, plan = later_plans("5:32,9:x8", case("data=2,fsdp=4", zero=3))
    assert found == [plan, plan]


def test_microbatches_follow_the_batch_and_the_layout_stays():
    (found,), plan = later_plans("5:8", case("pipe=2,data=2,tensor=2", microbatches=None))
    assert plan.microbatches == 8
    assert found == replace(plan, microbatches=4)


def test_requested_microbatches_are_not_changed():
    with pytest.raises(
        PlanError,
        match=(
            r"after step 5 \(data.phases: 24 x 16 tokens from step 6\): the global batch"
            r" does not divide(.|\n)*--microbatches"
        ),
    ):
        later_plans("5:24", case("data=8", microbatches=2))


def test_remat_increases_where_memory_is_short(monkeypatch):
    """One microbatch of long sequences per device does not fit, and there are no smaller ones."""
    plain = phase_plans.fits

    def fits(memory, there):
        return plain(memory, there) and memory.activations <= 2**17

    chosen = case("data=8", microbatches=None)
    (found,), plan = later_plans("5:8x16", chosen)
    assert found == plan
    monkeypatch.setattr(phase_plans, "fits", fits)
    (found,), plan = later_plans("5:8x16", chosen)
    assert found.remat != plan.remat == "none"
    assert found == replace(plan, remat=found.remat)


def test_requested_mesh_is_kept_unless_the_controller_may_change_it():
    with pytest.raises(PlanError, match="after step 5"):
        later_plans("5:4", case("fsdp=8", zero=3))
    # The speed of the devices is unknown, so the default rule decides: 4 rows are split over 4
    # devices, and layers over the rest.
    (found,), _ = later_plans("5:4", case("fsdp=8", zero=3), control="auto")
    assert found.axes == AxisSizes(data=4, tensor=2)


def test_past_phases_are_not_planned():
    config = make_config(LLAMA, case("data=8"), {"data.phases": "5:12,9:16"})
    plan = make_plan(config)
    assert [
        phase.steps_before for phase, _ in plans_ahead(config, plan, 5, TOPOLOGY, lambda _: None)
    ] == [9]
