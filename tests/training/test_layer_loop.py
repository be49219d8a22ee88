"""Loops over layers with their own backward: what their programs compute and exchange.

That they train like one device is tested with the other plans (test_equal_to_one_device.py).
"""

from dataclasses import replace

import plans
import pytest

from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.models.program_reader import ProgramReader, collectives_of, needed
from optimus_jax.planning.ahead_of_time.hlo import HloProgram

DEEP = replace(plans.LLAMA, num_layers=6, dropout=0.0)


def traced(mesh: str, model=DEEP, **settings):
    """The program of a step, without what no result needs."""
    program = plans.build(model, plans.case(mesh, **settings)).program
    step = program.train_step.trace(program.abstract_state(), program.abstract_batch())
    return needed(step.jaxpr.jaxpr)


def bytes_by_op(jaxpr) -> dict:
    return {
        key: sum(size * times for size, times in messages)
        for key, messages in collectives_of(jaxpr).items()
    }


def flops(**settings) -> float:
    return sum(
        product.flops(()) for product in ProgramReader().part(traced("data=1", **settings)).products
    )


def test_every_kept_layer_saves_as_much_recomputation():
    none, full = (flops(overlap="layers", remat=remat) for remat in ("none", "full"))
    saved = (full - none) / DEEP.num_layers
    assert saved > 0
    for kept in (1, 4, 6):
        computed = flops(overlap="layers", remat="full", kept_layers=kept)
        assert computed == pytest.approx(full - kept * saved)


def test_matrices_are_gathered_and_gradients_scattered_once_per_use():
    """One layer is gathered once more: the first forward gathers ahead of what follows it."""
    alone, ahead = (
        bytes_by_op(traced("fsdp=4,data=2", zero=3, overlap=overlap))
        for overlap in ("none", "layers")
    )
    scatters, gathers = ("reduce-scatter", ("fsdp",)), ("all-gather", ("fsdp",))
    assert ahead[scatters] == alone[scatters]
    layers = (
        alone[gathers]
        - bytes_by_op(traced("fsdp=4,data=2", replace(DEEP, num_layers=3), zero=3, overlap="none"))[
            gathers
        ]
    )
    of_one = layers / 3 / 2
    assert ahead[gathers] - alone[gathers] == pytest.approx(of_one)


def test_replicas_sum_gradients_of_layers_in_backward():
    """With one microbatch the sum of every layer's matrices is a part of the loop."""
    text = {
        overlap: plans.compiled_step(
            plans.build(DEEP, plans.case("data=8", overlap=overlap))
        ).as_text()
        for overlap in ("none", "layers")
    }
    times = {
        overlap: [
            each.times
            for each in HloProgram(program or "").collectives()
            if each.kind == "all-reduce" and each.payload_bytes > 10_000
        ]
        for overlap, program in text.items()
    }
    assert set(times["none"]) == {1}
    # The last layer's sum is beside the first iteration of backward, the first one's after it.
    assert max(times["layers"]) == DEEP.num_layers - 1


def test_a_program_does_not_grow_with_depth():
    settings = {"overlap": "layers", "remat": "full", "kept_layers": 2}
    texts = []
    for depth in (6, 48):
        program = plans.build(
            replace(DEEP, num_layers=depth), plans.case("fsdp=8", **settings)
        ).program
        lowered = program.train_step.lower(program.abstract_state(), program.abstract_batch())
        texts.append(lowered.as_text())
    assert "6x" in texts[0]
    assert "48x" in texts[1]
    assert texts[0].count("\n") == texts[1].count("\n") > 1000


@pytest.mark.parametrize(
    ("mesh", "settings", "says"),
    [
        ("fsdp=8", {"overlap": "none", "kept_layers": 1}, "only in the loops of overlap=layers"),
        ("fsdp=8", {"kept_layers": 4}, "test-gpt has 3 layers"),
        ("data=8", {"overlap": "halves", "microbatches": 2}, "have no halves"),
        (
            "fsdp=8",
            {"overlap": "layers", "offload": "activations", "remat": "full"},
            "cannot be offloaded from loops",
        ),
    ],
)
def test_what_loops_cannot_do_is_refused(mesh, settings, says):
    with pytest.raises((ConfigError, PlanError), match=says):
        plans.build(plans.GPT, plans.case(mesh, **settings))


def test_kept_layers_alone_choose_loops_of_their_own():
    plan = plans.build(plans.GPT, plans.case("fsdp=8", kept_layers=1, remat="full")).plan
    assert (plan.overlap, plan.kept_layers) == ("layers", 1)
    assert "remat full but for 1 layers" in plan.describe()
