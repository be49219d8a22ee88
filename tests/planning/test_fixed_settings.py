"""Settings of layers' loops and of scatters that a search cannot use are refused with a reason, as
a run refuses them.
"""

from dataclasses import replace

import pytest
from plans import LLAMA

from optimus_jax import find_plans
from optimus_jax.config import Config, ParallelConfig
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.planning.search.assemble import kept_layers

SEARCH = {"model": "gpt2-nano", "cluster": "h100:8", "seq_len": 64, "global_batch": 16}


def test_more_layers_than_a_model_has_cannot_be_kept():
    most = model_preset("gpt2-nano").num_layers
    with pytest.raises(ConfigError, match=f"gpt2-nano has {most} layers"):
        find_plans(**SEARCH, **{"parallel.kept_layers": most + 1})
    assert find_plans(**SEARCH, **{"parallel.kept_layers": most})
    with pytest.raises(PlanError, match=f"kept_layers={most}, and a visit has {most // 2} layers"):
        find_plans(**SEARCH, mesh="pipe=2,fsdp=4", **{"parallel.kept_layers": most})


def test_layers_are_kept_only_where_others_recompute():
    found = find_plans(**SEARCH, **{"parallel.kept_layers": 2})
    assert all(plan.plan.kept_layers == 0 for plan in found if plan.plan.remat == "none")
    config = Config(model=LLAMA, parallel=ParallelConfig(kept_layers=2))
    assert [kept_layers(config, remat) for remat in ("none", "dots", "full")] == [0, 2, 2]
    found = find_plans(**SEARCH, **{"parallel.kept_layers": 2, "remat": "full"})
    assert {plan.plan.kept_layers for plan in found} == {2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"remat": "none"}, "nothing is recomputed"),
        ({"overlap": "none"}, "only in the loops of overlap=layers"),
    ],
)
def test_a_policy_that_keeps_nothing_apart_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        ParallelConfig(kept_layers=2, **settings)
    assert "leave parallel.kept_layers out" in str(error.value)
    assert ParallelConfig(kept_layers=0, **settings).kept_layers == 0


def test_halves_need_an_even_number_of_rows():
    with pytest.raises(PlanError, match="no microbatch has an even number of rows"):
        find_plans(
            **SEARCH, mesh="data=4,tensor=2", microbatches=4, **{"parallel.overlap": "halves"}
        )


def test_gradients_are_exchanged_only_over_fsdp():
    exchange = {"parallel.scatter": "exchange"}
    needs = "scatter=exchange needs gradients that backward scatters over fsdp"
    with pytest.raises(PlanError, match=needs):
        find_plans(**SEARCH, mesh="data=8", **exchange)
    with pytest.raises(PlanError, match=needs):
        find_plans(**SEARCH, mesh="fsdp=8", **{"parallel.zero": 1}, **exchange)
    plans = [found.plan for found in find_plans(**SEARCH, **exchange)]
    assert {plan.zero for plan in plans if plan.axes.fsdp > 1} <= {2, 3}
    assert all((plan.scatter == "exchange") == (plan.axes.fsdp > 1) for plan in plans)
    plan = next(plan for plan in plans if plan.axes.fsdp > 1)
    for zero in (0, 1):
        with pytest.raises(PlanError, match="backward scatters no gradient"):
            replace(plan, zero=zero).validate(model_preset("gpt2-nano"), global_batch=16)
