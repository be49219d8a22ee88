"""Reference steps: the rates that are fitted to them, and the file that they are saved in."""

import json
from dataclasses import replace

import pytest

from optimus_jax.config import Config
from optimus_jax.config.axes import AxisSizes
from optimus_jax.mesh.build import discover
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.learning.fit import Sample
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.planning.trials.reference_steps import (
    ReferenceStep,
    fitted,
    path_of,
    read_steps,
    reference_settings,
    time_reference_steps,
    write_steps,
)

RATES = Rates(
    accelerator="cpu",
    source="made up",
    matmul_flops_per_s=5e10,
    f32_matmul_flops_per_s=5e10,
    memory_bytes_per_s=6e9,
    pass_share=0.25,
    num_cores=0.0,
)
TRUTH = replace(
    RATES, launch_overlap=1.0, launch_s=3e-5, arrival_s=8e-4, step_s=8e-3, pass_share=0.5
)


@pytest.fixture
def topology_and_cluster() -> tuple[Topology, Cluster]:
    topology = discover()
    return topology, replace(
        Cluster.of(topology),
        intra_host=Link(name="memory", bytes_per_s=7e9, latency_s=1e-5, source="made up"),
    )


def steps_of(topology: Topology, cluster: Cluster, truth: Rates) -> tuple[ReferenceStep, ...]:
    """The steps as devices with these rates would take them."""
    unset = [
        ReferenceStep(settings=settings, step_time_s=1.0)
        for settings in reference_settings(topology.num_devices, "cpu")
    ]
    return tuple(
        replace(step, step_time_s=step.sample(topology, cluster).predicted(truth).step_time_s)
        for step in unset
    )


def test_reference_steps_fit_rates_that_no_probe_measures(topology_and_cluster):
    topology, cluster = topology_and_cluster
    found = fitted(RATES, steps_of(topology, cluster, TRUTH), topology, cluster)
    config = Config().with_values(
        {
            "model.num_layers": 3,
            "model.embed_dim": 256,
            "data.global_batch": 16,
            "data.seq_len": 256,
        }
    )
    for axes in (AxisSizes(data=8), AxisSizes(data=2, tensor=4), AxisSizes(pipe=2, fsdp=4)):
        other = Sample(
            workload=Workload.of(config),
            plan=plan_for(config, axes, topology),
            cluster=cluster,
            step_time_s=1.0,
        )
        true_s = other.predicted(TRUTH).step_time_s
        assert other.predicted(found).step_time_s == pytest.approx(true_s, rel=0.06)
        # without the fit the prediction is off
        assert other.predicted(RATES).step_time_s != pytest.approx(true_s, rel=0.15)
    assert found.source.endswith("training steps")


@pytest.mark.parametrize("copies", [0.5, 6.0])
def test_what_recomputing_costs_is_that_of_the_steps(topology_and_cluster, copies):
    """Steps of one shape say precisely how they differ, whatever all of them have in common."""
    topology, cluster = topology_and_cluster
    truth = replace(TRUTH, saved_copies=copies)
    steps = tuple(
        replace(step, step_time_s=1.15 * step.step_time_s)
        for step in steps_of(topology, cluster, truth)
    )
    found = fitted(RATES, steps, topology, cluster)

    def cost(rates: Rates) -> float:
        """Of recomputing, as a ratio of step times."""
        recomputed, kept = (
            replace(each, settings=each.settings | {"model.embed_dim": 256, "model.mlp_dim": 1024})
            .sample(topology, cluster)
            .predicted(rates)
            .step_time_s
            for each in (steps[3], steps[0])
        )
        return recomputed / kept

    assert steps[3].settings["parallel.remat"] == "full"
    assert cost(found) == pytest.approx(cost(truth), abs=0.03)


def test_too_few_steps_change_nothing(topology_and_cluster):
    topology, cluster = topology_and_cluster
    assert fitted(RATES, steps_of(topology, cluster, TRUTH)[:2], topology, cluster) is RATES


def test_one_device_has_reference_steps_too():
    assert [settings["parallel.mesh"] for settings in reference_settings(1, "gpu")] == [
        str(AxisSizes())
    ] * 5


def test_steps_are_timed_saved_and_read_again(topology_and_cluster, tmp_path, monkeypatch):
    topology, _ = topology_and_cluster
    monkeypatch.setattr(
        "optimus_jax.planning.trials.reference_steps.reference_settings",
        lambda *_: reference_settings(8, "cpu")[-2:],
    )
    monkeypatch.setattr("optimus_jax.planning.trials.reference_steps.NUM_STEPS", 1)
    reported: list[str] = []
    steps = time_reference_steps(topology, progress=lambda text, _: reported.append(text))
    assert [step.step_time_s > 0 for step in steps] == [True, True]
    assert reported == ["training step 0", "training step 1"]
    path = path_of(tmp_path / "profile.json", topology)
    write_steps(path, steps)
    assert read_steps(path) == steps


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[{}]",
        json.dumps([{"settings": {"model.nothing": 1}, "step_time_s": 1.0}]),
        json.dumps([{"settings": {}, "step_time_s": 0}]),
    ],
)
def test_damaged_file_of_steps_is_ignored(text, tmp_path):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match="do not count"):
        assert read_steps(path) == ()


def test_missing_file_gives_no_steps(tmp_path):
    assert read_steps(tmp_path / "none.json") == ()
