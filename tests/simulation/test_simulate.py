"""Comparisons, replays and the command line: the table agrees with the runs, and a user's mistake
ends with one message.
"""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from in_process import SCRIPTS, run_in_process
from simulated import PRICING, FollowsScript, run, scenario, setup_of

from optimus_jax.cli.simulate import with_cluster
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.request import make_config
from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.simulation.comparison import LEAST_GAIN, estimate, rows
from optimus_jax.simulation.outcome import Outcome, RunEvent
from optimus_jax.simulation.replay import recorded
from optimus_jax.simulation.setup import Setup, Truth, default_plans

PLAN = default_plans(PRICING, 16)[0]


def outcome(total_s, *kinds):
    run_events = tuple(
        RunEvent(kind=kind, step=1, time_s=1.0, plan=PLAN, delay_s={}, why="") for kind in kinds
    )
    return Outcome(total_s=total_s, run_events=run_events, probes_s=0.0, plan=PLAN)


# Comparisons


def test_rows_summarise_the_runs():
    runs = [
        {
            "auto": outcome(80.0, "switch", "rollback"),
            "stay": outcome(100.0),
            "default": outcome(160.0),
            "best static": outcome(90.0),
            "oracle": outcome(75.0),
        },
        {
            "auto": outcome(100.0),
            "stay": outcome(100.0),
            "default": outcome(160.0),
            "best static": outcome(100.0),
            "oracle": outcome(95.0),
        },
    ]
    auto, stay, *_ = rows(runs)
    assert auto.total_s.value == 90.0
    assert auto.saved.value == pytest.approx(1 - 180 / 320)
    assert auto.share.value == pytest.approx(20 / 30)
    assert auto.regret.value == pytest.approx((80 / 90 + 1) / 2 - 1)
    assert (auto.switches, auto.most_switches, auto.rollbacks, stay.most_switches) == (
        0.5,
        1,
        0.5,
        0,
    )
    assert auto.total_s.low == 80.0
    assert auto.total_s.high == 100.0


def test_without_an_oracle_gain_there_is_no_share_of_it():
    runs = [
        {
            "auto": outcome(100.0),
            "stay": outcome(100.0),
            "oracle": outcome(100.0 * (1 - LEAST_GAIN / 2)),
        }
    ]
    assert [row.share for row in rows(runs)] == [None] * 3


def test_confidence_intervals_have_their_nominal_coverage():
    """The interval of the mean of 30 normal draws holds the true mean in about 95% of 200 samples;
    three deviations of that share are 5%.
    """
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        drawn = random.normal(size=30)
        found = estimate(lambda index, drawn=drawn: drawn[index].mean(axis=-1), 30)
        covered += found.low <= 0 <= found.high
    assert 0.88 <= covered / 200 <= 1.0


# Replays


def record(path, times_s, plans):
    path.mkdir()
    (path / "config.json").write_text(PRICING.config.to_json())
    (path / "plan.json").write_text(PLAN.to_json())
    lines = [
        json.dumps({"step": step, "step_time_s": time_s, "plan": plan})
        for step, (time_s, plan) in enumerate(zip(times_s, plans, strict=True), start=1)
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 99, "st')
    return path


def test_a_replay_under_the_recorded_plan_takes_the_recorded_time(tmp_path):
    times_s = [0.5] * 30 + [1.5] * 10 + [0.5] * 20
    made = recorded(record(tmp_path / "run", times_s, [PLAN.digest] * 60))
    truth = Truth(
        Setup.of(made.scenario, replace(PRICING, config=made.config), start=made.start), 0
    )
    assert truth.setup.start == PLAN
    assert truth.setup.num_steps == 60
    policy = FollowsScript()
    assert run(truth, policy, every=1).total_s == pytest.approx(sum(times_s))
    assert [observation.step_times_s[0] for observation in policy.observations] == pytest.approx(
        times_s[:59]
    )


def test_a_recording_with_two_plans_has_the_noise_of_each(tmp_path):
    made = recorded(
        record(
            tmp_path / "run",
            [0.5] * 20 + [0.3] * 10 + [0.6] * 5 + [0.3] * 5,
            [PLAN.digest] * 20 + ["another"] * 20,
        )
    )
    assert made.scenario.step_factors == pytest.approx([1.0] * 30 + [2.0] * 5 + [1.0] * 5)
    assert made.scenario.step_time_s == 0.5


def test_a_recording_with_a_switch_starts_with_the_plan_before_it(tmp_path):
    run_dir = record(tmp_path / "run", [0.5] * 20, [PLAN.digest] * 10 + ["another"] * 10)
    (run_dir / "plan.json").write_text(replace(PLAN, remat="none").to_json())
    begin_record = {
        "record": "begin",
        "step": 10,
        "source": asdict(PLAN),
        "target": asdict(replace(PLAN, remat="none")),
        "why": "",
        "by_choice": True,
    }
    (run_dir / "switches.jsonl").write_text(json.dumps(begin_record) + "\n")
    assert recorded(run_dir).start == PLAN


def test_a_batch_that_does_not_divide_over_the_recorded_plan_is_refused(tmp_path):
    made = recorded(record(tmp_path / "run", [0.5] * 20, [PLAN.digest] * 20))
    config = made.config.with_values({"data.global_batch": made.start.axes.num_devices + 1})
    with pytest.raises(PlanError):
        Setup.of(
            replace(made.scenario, global_batch=None),
            replace(PRICING, config=config),
            start=made.start,
        )


def test_directories_that_are_no_usable_recording_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="a run cannot be read"):
        recorded(tmp_path / "none")
    with pytest.raises(ConfigError, match="too few steps"):
        recorded(record(tmp_path / "run", [0.5] * 3, [PLAN.digest] * 3))
    with pytest.raises(ConfigError, match="what plan it began with"):
        recorded(record(tmp_path / "other", [0.5] * 20, ["another"] * 20))


# Set-ups


def test_the_default_plan_is_fsdp_over_all_devices_with_full_remat():
    assert (PLAN.axes.fsdp, PLAN.microbatches, PLAN.remat, PLAN.zero, PLAN.pipeline) == (
        16,
        1,
        "full",
        3,
        None,
    )


def test_the_scenario_sets_the_number_of_steps_and_the_first_plan():
    assert setup_of(scenario(steps=77)).num_steps == 77
    made = setup_of(scenario(steps=None, duration_s=100.0))
    assert made.num_steps == round(100 / PRICING.step_time_s(made.start))
    assert str(setup_of(scenario(start="data=2,fsdp=8")).start.axes) == "data=2,fsdp=8"


# The command line


def loaded(path):
    """Load a script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def simulate(*arguments):
    return run_in_process("simulate", *arguments)


def test_a_scenario_file_is_simulated_and_reported_as_json(tmp_path):
    (tmp_path / "mine.json").write_text(
        json.dumps(
            {"name": "mine", "steps": 60, "events": [{"kind": "link", "factor": 0.5, "start_s": 3}]}
        )
    )
    ran = subprocess.run(
        [
            sys.executable,
            SCRIPTS / "simulate.py",
            "--scenario",
            tmp_path / "mine.json",
            "--model",
            "gpt2",
            "--cluster",
            "h100:2x8",
            "--global-batch",
            "64",
            "--seeds",
            "2",
            "--policy",
            "auto",
            "--policy",
            "greedy",
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert (report["simulated"], report["scenario"], report["steps"], len(report["runs"])) == (
        True,
        "mine",
        60,
        2,
    )
    assert [row["method"] for row in report["methods"]] == [
        "auto",
        "stay",
        "default",
        "best static",
        "oracle",
        "greedy",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scenario", "link-quartr"), "did you mean 'link-quarter'"),
        (("--policy", "atuo"), "did you mean 'auto'"),
        (("--seeds", "0"), "at least one seed"),
        (("--cluster", "h100:8by8"), "numbers of hosts and devices"),
        (("--replay", "no-such-run"), "a run cannot be read"),
        (("--replay", "runs/a", "--model", "gpt2"), "--replay with --model"),
        (("--cluster", "here", "--link", "inter_host=1GB/s"), "this machine are measured"),
        (("--cluster", "h100:8", "--cpu-devices", "4"), "add --cluster here"),
        (("--cluster", "here", "--cpu-devices", "0"), "--cpu-devices must be at least 1"),
        (("--set", "controller.budget_shar=1"), "did you mean 'controller.budget_share'"),
    ],
)
def test_user_mistakes_end_with_one_message(arguments, message):
    failed = simulate(*arguments)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_run_on_virtual_devices_is_replayed_on_as_many_devices(tmp_path):
    run_dir = tmp_path / "run"
    config = make_config("gpt2-nano", {"cpu_devices": "4", "global_batch": "8", "seq_len": "32"})
    plan = plan_for(
        config,
        AxisSizes(fsdp=4),
        Topology(
            num_devices=4, num_processes=1, platform="cpu", device_kind="cpu", bytes_per_device=None
        ),
    )
    record(run_dir, [0.5] * 20, [plan.digest] * 20)
    (run_dir / "config.json").write_text(config.to_json())
    (run_dir / "plan.json").write_text(plan.to_json())
    assert with_cluster({}, recorded(run_dir)) == {"cluster": "here", "cpu_devices": 4}
    assert with_cluster({"cluster": "h100:1x4"}, recorded(run_dir)) == {"cluster": "h100:1x4"}
    assert with_cluster({}, None) == {"cluster": "h100:8x8"}
    ran = simulate(
        "--replay", run_dir, "--seeds", 1, "--policy", "auto", "--json", "--cluster", "h100:1x4"
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert (report["model"], report["steps"], report["start"], report["tried"]) == (
        "gpt2-nano",
        20,
        plan.describe(),
        [plan.describe()],
    )


def test_unknown_devices_in_a_scenario_are_named(tmp_path):
    (tmp_path / "mine.json").write_text(
        '{"name": "mine", "events": [{"kind": "lost", "devices": [3, 999]}]}'
    )
    failed = simulate("--scenario", tmp_path / "mine.json")
    assert failed.returncode == 2
    assert re.search(r"devices=\[999\][\s\S]*name devices 0 to 63, or hosts 0 to 7", failed.stderr)


def test_a_recording_of_other_size_names_the_cluster_to_ask_for(tmp_path):
    failed = simulate(
        "--replay",
        record(tmp_path / "run", [0.5] * 20, [PLAN.digest] * 20),
        "--cluster",
        "h100:1x2",
    )
    assert failed.returncode == 2
    assert re.search(
        rf"starts on {PLAN.num_devices} devices, and the cluster has 2[\s\S]*--cluster"
        rf" NAME:1x{PLAN.num_devices}",
        failed.stderr,
    )
