"""`find_plans`, `optimus plan` and how a run uses the planner."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_process import Ended, run_in_process
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.cli.plan_output import train_command
from optimus_jax.config import Config
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import ConfigError, OptimusError, PlanError
from optimus_jax.mesh.build import discover
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.planning.api import find_plans
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.local_cluster import LocalCluster
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.explain import layout_settings

PLAN = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "plan.py")]
JSON_FIELDS = {
    "rank",
    "axes",
    "schedule",
    "microbatches",
    "remat",
    "zero",
    "step_time_s",
    "step_time_interval_s",
    "tokens_per_s",
    "mfu",
    "memory_bytes",
    "bubble",
    "communication",
    "why",
}


def plan(*flags: str) -> Ended:
    return run_in_process("plan", *flags)


def run_script(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([*PLAN, *flags], capture_output=True, text=True, check=False)


def test_plans_come_best_first_with_a_reason_each():
    found = find_plans("gpt2-xl", "h100:2x8", top=5, seq_len=1024)
    assert [ranked.rank for ranked in found] == [1, 2, 3, 4, 5]
    assert [ranked.step_time_s for ranked in found] == sorted(
        ranked.step_time_s for ranked in found
    )
    assert found[0].plan.precision == "bf16"
    assert "the fastest that fits of" in found[0].why
    for ranked in found:
        ranked.plan.validate(model_preset("gpt2-xl"), global_batch=8 * 16)
        assert set(ranked.as_json()) >= JSON_FIELDS
        assert ranked.as_json() == json.loads(json.dumps(ranked.as_json()))
        assert ranked.prediction.low_s < ranked.step_time_s < ranked.prediction.high_s


def test_a_model_of_sound_is_planned_with_stages_of_equal_time():
    best, *others = find_plans("whisper-small", "h100:2x8", top=3)
    assert len(others) == 2
    assert best.prediction.tokens_per_s * best.step_time_s == pytest.approx(128 * (1500 + 448))
    for ranked in (best, *others):
        ranked.plan.validate(model_preset("whisper-small"), global_batch=128)
        assert 0 < ranked.memory.total < 0.9 * 80e9
    staged, halves = (
        find_plans("whisper-small", "h100:2x8", top=1, mesh="pipe=2,fsdp=8", **layers)[0]
        for layers in ({"parallel.repeats": 1}, {"parallel.layers_per_stage": "12,12"})
    )
    assert staged.plan.pipeline is not None
    assert staged.plan.pipeline.layers_per_stage == (9, 15)
    assert staged.step_time_s < halves.step_time_s


def test_given_settings_are_kept_and_flags_reproduce_the_plan():
    [best] = find_plans(
        "gpt2-xl",
        "h100:8",
        top=1,
        mesh="pipe=4,data=2",
        global_batch=32,
        precision="bf16",
        **{"parallel.repeats": 3},
    )
    assert str(best.axes) == "pipe=4,data=2"
    words = best.as_json()["flags"].split()
    pairs = list(zip(words[::2], words[1::2], strict=True))
    settings = {flag.removeprefix("--"): value for flag, value in pairs if flag != "--set"}
    settings |= dict(value.split("=", 1) for flag, value in pairs if flag == "--set")
    assert settings["parallel.stage_residuals"] == "keep"
    again = find_plans("gpt2-xl", "h100:8", top=1, global_batch=32, precision="bf16", **settings)
    assert again[0].plan == best.plan


def test_unknown_names_and_speeds_are_errors_that_say_what_to_do():
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        find_plans("gpt2", "h1oo:8")
    with pytest.raises(OptimusError, match=r"the speed of a .* is unknown"):
        find_plans("gpt2", "cpu:8")
    with pytest.raises(ConfigError, match="give one such as h100:8x8"):
        find_plans("gpt2", 8)  # pyright: ignore[reportArgumentType]
    unknown = Cluster.parse("h100:2x8")
    assert unknown.inter_host is not None
    unknown = replace(unknown, inter_host=replace(unknown.inter_host, bytes_per_s=None))
    with pytest.raises(PlanError, match="--link inter_host="):
        find_plans("gpt2", unknown)
    assert find_plans("gpt2", unknown, links=["between=50GB/s"], top=1)


def test_given_schedule_leaves_repeats_to_the_planner():
    [best] = find_plans(
        "gpt2-xl", "h100:8", top=1, mesh="pipe=4,data=2", global_batch=32, schedule="interleaved"
    )
    fixed = [
        find_plans(
            "gpt2-xl",
            "h100:8",
            top=1,
            mesh="pipe=4,data=2",
            global_batch=32,
            **{"parallel.repeats": repeats},
        )[0]
        for repeats in (2, 3, 4, 6, 12)
    ]
    assert best.step_time_s == min(ranked.step_time_s for ranked in fixed)


def test_unsupported_precision_and_attention_are_not_planned():
    assert find_plans("gpt2", "v100:2", top=1)[0].plan.precision == "f16"
    assert find_plans("gpt2", "v100:2", top=1)[0].plan.attention == "xla"
    with pytest.raises(PlanError, match="a Tesla V100-SXM2-32GB has no bf16"):
        find_plans("gpt2", "v100:2", precision="bf16")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mesh": "data=4"}, "the mesh needs 4 devices; this run has 8"),
        ({"top": 0}, "ranks count from 1"),
        ({"mesh": "data=8", "zero": 2}, "splits over fsdp"),
        # as `train` refuses them
        ({"task": "dpo"}, "only adapters may be trained"),
        ({"preference.beta": 0.2}, "settings of preference pairs have no use"),
        ({"optimizer.lr_factors.adapter": 0.1}, "adapter"),
        ({"init_from": "runs/base"}, "name the run's model with --model"),
        ({"adapters_from": "runs/base"}, "give --model and --init-from "),
    ],
)
def test_illegal_settings_say_why(settings, text):
    with pytest.raises(OptimusError, match=text):
        find_plans("gpt2", "h100:8", **settings)


def test_zero_0_on_a_given_mesh_is_planned():
    assert find_plans("gpt2", "h100:8", top=1, mesh="fsdp=8", zero=0)[0].plan.zero == 0


def test_model_that_fits_nowhere_is_an_error():
    with pytest.raises(
        PlanError, match=r"no layout of llama3\.3-70b fits l4 devices(.|\n)*legal layouts on 2 x l4"
    ):
        find_plans("llama3.3-70b", "l4:2", global_batch=2)


def test_the_script_prints_a_table_and_json():
    flags = ("--model", "gpt2", "--cluster", "a100:4", "--top", "3")
    shown = run_script(*flags, "--explain", "2", "--rejected")
    assert shown.returncode == 0, shown.stderr
    for text in (
        "90% within ┃",
        " tokens/s ┃",
        "predicted, not measured",
        "/scripts/train.py --model gpt2 --precision bf16",
        "passes over",
        "memory of a device",
    ):
        assert text in shown.stdout
    listed = json.loads(plan(*flags, "--json").stdout)
    assert [entry["rank"] for entry in listed] == [1, 2, 3]
    assert set(listed[0]) >= JSON_FIELDS


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--cluster", "h100"), "needs its numbers of hosts and devices"),
        (("--cluster", "h100:8", "--explain", "11"), "ranks count from 1"),
        (("--cluster", "h100:8", "--measure"), "only this machine's devices can be measured"),
        (("--cluster", "h100:8", "--set", "x"), "--set needs a name and a value"),
        (("--cluster", "h100:8", "--link", "inside=fast"), "cannot read the link's speed 'fast'"),
    ],
)
def test_mistakes_end_with_one_message(flags, text):
    ended = plan("--model", "gpt2", *flags)
    assert ended.returncode == 2
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_impossible_settings_fail_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ended = plan("--model", "gpt2-nano", "--set", "parallel.offload=optimizer")
    assert ended.returncode == 2
    assert "offloading needs devices with memory separate from the host's" in ended.stderr
    measured = [
        path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "xla_flags"
    ]
    assert not measured, "a profile takes a minute or two"


@pytest.mark.parametrize("settings", ["parallel.offload=optimizer", "parallel.rules=mlp=none"])
def test_train_command_has_each_setting_once(settings):
    shown = plan(
        "--model",
        "gpt2",
        "--cluster",
        "h100:2",
        "--mesh",
        "tensor=2",
        "--top",
        "1",
        "--set",
        settings,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.partition("train with:")[2].count(settings) == 1


def test_train_command_can_be_pasted_into_a_shell():
    found = find_plans("gpt2", "h100:2", mesh="tensor=2", top=1)
    allowed = "controller.allow=data=2;tensor=2"
    given = {
        "model": "my models/gpt2",
        "cpu_devices": 2,
        "set": [allowed, "parallel.rules=vocab=none"],
    }
    layout = layout_settings(found[0].plan) | {"parallel.rules": ("heads=none",)}
    search = SimpleNamespace(config=Config(), plans=found)
    words = shlex.split(train_command(given, search, layout))
    assert words[words.index("--model") + 1] == "my models/gpt2"
    assert words[words.index("--cpu-devices") + 1] == "2"
    assert allowed in words
    assert "parallel.rules=vocab=none,heads=none" in words, "the user's, and the plan's"


def profiled(topology, tmp_path) -> LocalCluster:
    """Devices as if they had been measured."""
    cluster = Cluster.parse("h100:8")
    return LocalCluster(
        cluster=replace(
            cluster,
            accelerator=replace(
                cluster.accelerator, platform="cpu", memory_bytes=topology.bytes_per_device
            ),
        ),
        rates=Rates.of(cluster.accelerator),
        records=tmp_path / "steps.jsonl",
    )


def run(tmp_path, **overrides):
    return optimus_jax.train(
        "gpt2-nano",
        run_dir=tmp_path / "run",
        progress="none",
        eval_every=0,
        seq_len=32,
        global_batch=8,
        **{
            "model.num_layers": 2,
            "model.embed_dim": 32,
            "model.mlp_dim": 64,
            "checkpoint.every": 0,
        },
        **overrides,
    )


def test_run_tries_the_best_plans_and_resumes_with_its_choice(tmp_path, monkeypatch):
    local_cluster = profiled(discover(), tmp_path)
    monkeypatch.setattr("optimus_jax.run.whole_run.known_devices", lambda topology: local_cluster)
    # a run for which trying pays
    monkeypatch.setattr("optimus_jax.planning.trials.measure.expected_gain", lambda *args: 1e9)
    result = run(tmp_path, steps=1)
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    trials = [event for event in events if event["event"] == "decision"]
    assert len(trials) == 3
    assert (
        min(trials, key=lambda event: event["measured_step_time_s"])["plan"] == result.plan.digest
    )
    assert len(local_cluster.records.read_text().splitlines()) == 3
    assert any("fastest of 3" in event.get("why", "") for event in events)

    # without measurements the rule would choose data=8
    monkeypatch.setattr("optimus_jax.run.whole_run.known_devices", lambda topology: None)
    resumed = optimus_jax.train(run_dir=tmp_path / "run", resume=True, steps=2)
    assert resumed.plan == result.plan
    moved = optimus_jax.train(run_dir=tmp_path / "run", resume=True, steps=3, mesh="tensor=8")
    assert str(moved.plan.axes) == "tensor=8"
    assert [record.step for record in moved.history] == [1, 2, 3]


def test_short_run_tries_no_plan(tmp_path, monkeypatch):
    local_cluster = profiled(discover(), tmp_path)
    monkeypatch.setattr("optimus_jax.run.whole_run.known_devices", lambda topology: local_cluster)
    run(tmp_path, steps=1)
    assert '"decision"' not in (tmp_path / "run" / "events.jsonl").read_text()
    assert not local_cluster.records.exists()


def test_resuming_does_not_need_the_schedule_file(tmp_path):
    table = tmp_path / "own.json"
    table.write_text(make_schedule("gpipe", 2, 2).to_json())
    result = run(tmp_path, steps=1, mesh="pipe=2,data=4", schedule=str(table))
    table.unlink()
    assert optimus_jax.train(run_dir=tmp_path / "run", resume=True, steps=2).plan == result.plan


@pytest.mark.nightly  # a minute: measures this machine, as the first `optimus plan` on it does
def test_script_measures_this_machine_and_plans_for_it(tmp_path):
    """Through the script, with a small profile made once; no assertion depends on times."""
    flags = (
        "--model",
        "gpt2-nano",
        "--cpu-devices",
        "2",
        "--global-batch",
        "4",
        "--seq-len",
        "32",
        "--json",
    )
    ended = run_script(*flags)
    assert ended.returncode == 0, ended.stderr
    listed = json.loads(ended.stdout)
    assert {tuple(entry["axes"].values()) for entry in listed} == {
        (1, 2, 1, 1),
        (1, 1, 2, 1),
        (1, 1, 1, 2),
        (2, 1, 1, 1),
    }
    assert all(entry["mfu"] is None and entry["precision"] == "f32" for entry in listed)


def test_planner_defaults_do_not_override_fixed_settings():
    assert (
        find_plans("gpt2", "h100:8", top=1, **{"precision.compute": "f16"})[0].plan.precision
        == "f16"
    )
    assert find_plans("gpt2", "h100:8", top=1, **{"data.global_batch": 24})[
        0
    ].plan.batch_ways() in (1, 2, 4, 8)
