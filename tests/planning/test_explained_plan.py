"""`explain_plan`, and plans for the devices of this process."""

from dataclasses import replace

import pytest

import optimus_jax
from optimus_jax.errors import ConfigError, OptimusError, PlanError
from optimus_jax.planning import api
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.local_cluster import LocalCluster
from optimus_jax.planning.profiles.cluster import Cluster

SETTINGS = {"seq_len": 64, "global_batch": 16}
MODEL, CLUSTER = "gpt2-nano", "h100:8"


@pytest.fixture(scope="module")
def best():
    return optimus_jax.find_plans(MODEL, CLUSTER, top=1, **SETTINGS)[0]


def test_a_plan_of_ones_own_is_explained_beside_the_best(best, tmp_path):
    own = replace(best.plan, microbatches=2)
    file = tmp_path / "plan.json"
    file.write_text(own.to_json())
    text = optimus_jax.explain_plan(file, MODEL, CLUSTER, **SETTINGS)
    assert text == optimus_jax.explain_plan(own, MODEL, CLUSTER, **SETTINGS)
    assert f"beside the best, {best.plan.describe()}: " in text
    assert "slower: " in text
    assert "activations" in text
    same = optimus_jax.explain_plan(best, MODEL, CLUSTER, **SETTINGS)
    assert "as fast as the best plan that fits" in same
    assert same.splitlines()[1:] == best.explain().splitlines()[1:]


def test_a_plan_that_does_not_fit_says_so():
    [best] = optimus_jax.find_plans("llama3-8b", CLUSTER, top=1, global_batch=128, seq_len=2048)
    own = replace(best.plan, remat="none", kept_layers=0, microbatches=1)
    text = optimus_jax.explain_plan(own, "llama3-8b", CLUSTER, global_batch=128, seq_len=2048)
    assert "it does not fit: " in text


@pytest.mark.parametrize(
    ("plan", "settings", "error", "message"),
    [
        ("missing.json", SETTINGS, ConfigError, r"a plan is a Plan, or the path"),
        (3, SETTINGS, ConfigError, r"a plan is a Plan, or the path"),
        (None, {"seq_len": 64, "global_batch": 12}, PlanError, "global batch does not divide"),
    ],
)
def test_what_cannot_be_explained_is_refused(best, plan, settings, error, message):
    with pytest.raises(error, match=message):
        optimus_jax.explain_plan(best if plan is None else plan, MODEL, CLUSTER, **settings)


def test_other_devices_than_the_plans_are_refused(best):
    with pytest.raises(PlanError, match="the mesh needs 8 devices"):
        optimus_jax.explain_plan(best, MODEL, "h100:4", **SETTINGS)


def test_without_a_cluster_the_devices_of_the_process_are_planned_for(monkeypatch, tmp_path):
    def measured(topology):
        gpus = Cluster.parse(f"h100:{topology.num_devices}")
        return LocalCluster(
            cluster=gpus, rates=Rates.of(gpus.accelerator), records=tmp_path / "steps.jsonl"
        )

    monkeypatch.setattr(api, "measure_devices", measured)
    [best] = optimus_jax.find_plans(MODEL, top=1, **SETTINGS)
    assert best.plan.num_devices == 8
    assert "as fast as" in optimus_jax.explain_plan(best, MODEL, **SETTINGS)
    monkeypatch.setattr(api, "measure_devices", lambda topology: pytest.fail("measured"))
    with pytest.raises(OptimusError, match="unknown setting"):
        optimus_jax.find_plans(MODEL, steps_per_day=3)


def test_settings_of_a_ranked_plan_select_it(best):
    again = optimus_jax.find_plans(MODEL, CLUSTER, top=1, **SETTINGS, **best.settings)
    assert again[0].plan == best.plan
