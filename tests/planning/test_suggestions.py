"""Settings that an error suggests are accepted, whatever else was typed; no devices needed."""

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from optimus_jax.config import Config
from optimus_jax.config.request import (
    FIXED_FOR_A_RUN,
    SAVED_WITH_A_RUN,
    make_config,
    resumed_config,
    typed,
)
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.planning.search.assemble import check_settings
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.planning.search.layouts import axis_sizes
from optimus_jax.planning.search.suggestions import MOST_NAMED, NAMED, nearest_accepted

GIB = 2**30


def settings_in(line: str) -> dict[str, str]:
    """The overrides that scripts/train.py reads from a command line."""
    words = line.split()
    pairs = [(flag, value) for flag, value in zip(words[::2], words[1::2], strict=True)]
    return dict(
        (
            value.split("=", 1)
            if flag == "--set"
            else (flag.removeprefix("--").replace("-", "_"), value)
        )
        for flag, value in pairs
    )


def config_of(line: str) -> Config:
    overrides = settings_in(line)
    return make_config(overrides.pop("model"), overrides)


def devices(config: Config, gib: float | None = None) -> Topology:
    assert config.cpu_devices is not None
    return Topology(
        num_devices=config.cpu_devices,
        num_processes=1,
        platform="cpu",
        device_kind="cpu",
        bytes_per_device=None if gib is None else int(gib * GIB / config.cpu_devices),
    )


def refusal(config: Config, gib: float | None = None, **more: Any) -> str:
    with pytest.raises(PlanError) as caught:
        choose_plan(config, devices(config, gib), **more)
    return str(caught.value)


def suggestions_in(text: str) -> list[str]:
    """The alternatives in an error."""
    _, given, do = text.splitlines()
    assert given.startswith("  given: ")
    assert do.startswith("  do:    ")
    certain, _, alternatives = do.partition(NAMED)
    assert "--" not in certain or not alternatives, "only what has been accepted is named"
    return alternatives.split(" or ") if alternatives else []


NANO = "--model gpt2-nano --cpu-devices 8 "


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        (
            NANO + "--mesh pipe=8 --microbatches 16",
            ["--mesh pipe=4,tensor=2"],
        ),
        (
            "--model gpt2-nano --cpu-devices 5 --mesh pipe=5 --schedule gpipe",
            ["--mesh data=5 --schedule auto --global-batch 15"],
        ),
        (
            NANO
            + "--mesh pipe=2,data=4 --schedule interleaved --microbatches 3 --global-batch 24 --set"
            " parallel.repeats=2",
            ["--microbatches 2", "--schedule auto --set parallel.repeats=none"],
        ),
        (
            (
                "--model llama-nano --cpu-devices 4 --mesh pipe=4 --schedule 1f1b --set"
                " model.num_layers=12 --set parallel.repeats=4"
            ),
            ["--set parallel.repeats=none", "--mesh pipe=2,data=2 --schedule auto"],
        ),
        (
            NANO + "--mesh pipe=8 --schedule 1f1b --zero 2",
            ["--mesh pipe=4,fsdp=2"],
        ),
        (
            "--model llama-nano --cpu-devices 6 --mesh fsdp=3,pipe=2",
            ["--mesh pipe=3,fsdp=2"],
        ),
        (
            "--model gpt2-nano --cpu-devices 3 --mesh tensor=3",
            ["--mesh pipe=3", "--set parallel.rules=heads=none,mlp=none"],
        ),
        (
            "--model gpt2-nano --cpu-devices 6 --mesh fsdp=3,pipe=4 --schedule gpipe",
            ["--mesh pipe=3,fsdp=2"],
        ),
        (
            NANO
            + "--mesh data=2,pipe=4 --schedule interleaved --set parallel.layers_per_stage=1,1,2,2",
            ["--schedule auto --set parallel.layers_per_stage="],
        ),
        (NANO + "--mesh data=8 --zero 1", ["--zero 0", "--mesh data=4,fsdp=2"]),
        (NANO + "--mesh data=4,tensor=4", ["--mesh data=2,tensor=4", "--cpu-devices 16"]),
        (NANO + "--mesh data=8 --global-batch 12", ["--global-batch 16", "--mesh data=4,tensor=2"]),
        (NANO + "--mesh pipe=2,data=4 --schedule none", ["--schedule 1f1b"]),
    ],
)
def test_refusal_suggests_accepted_settings_nearest_first(line, nearest):
    config = config_of(line)
    alternatives = suggestions_in(refusal(config))
    assert alternatives[: len(nearest)] == nearest
    assert len(alternatives) <= MOST_NAMED
    for alternative in alternatives:
        assert_accepted(config, alternative)


def assert_accepted(config: Config, alternative: str, gib: float | None = None) -> None:
    other = make_config(None, settings_in(alternative), config)
    choose_plan(other, devices(other, gib))


MESHES = st.integers(1, 12).flatmap(
    lambda devices: st.sampled_from([str(axes) for axes in axis_sizes(devices)])
)
OPTIONS = {
    "--microbatches": st.integers(1, 12),
    "--schedule": st.sampled_from(("1f1b", "gpipe", "interleaved", "none")),
    "--zero": st.integers(0, 3),
    "--global-batch": st.integers(1, 48),
    "--remat": st.sampled_from(("full", "dots")),
    "--set parallel.repeats": st.integers(1, 4),
    "--set parallel.layers_per_stage": (
        st.lists(st.integers(1, 3), min_size=1, max_size=6).map(
            lambda layers: ",".join(map(str, layers))
        )
    ),
    "--set parallel.send_slack": st.just("true"),
    "--set parallel.stage_residuals": st.sampled_from(("keep", "recompute")),
    "--set parallel.rules": st.sampled_from(
        (
            "mlp=none",
            "heads=none",
            "vocab=none",
            "embed=none",
            "heads=none,mlp=none,vocab=none",
            "batch=data",
        )
    ),
    "--set model.num_layers": st.sampled_from((1, 3, 8, 12)),
}


@st.composite
def command_lines(draw: st.DrawFn) -> str:
    mesh = draw(st.one_of(MESHES, MESHES, st.just("auto")))
    fitting = 1
    for size in re.findall(r"\d+", mesh):
        fitting *= int(size)
    num_devices = draw(st.one_of(st.just(fitting), st.just(fitting), st.integers(1, 12)))
    chosen = draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=5))
    words = [
        f"--model {draw(st.sampled_from(('gpt2-nano', 'llama-nano')))} --cpu-devices {num_devices}"
        f" --mesh {mesh}"
    ]
    for option in chosen:
        words.append(f"{option}{'=' if option.startswith('--set') else ' '}{draw(OPTIONS[option])}")
    return " ".join(words)


GIBS = st.sampled_from((None, None, 0.2))


@pytest.mark.slow
@given(line=command_lines(), gib=GIBS)
@example(line=NANO + "--mesh tensor=8", gib=0.2)  # would fit all split, with moments in bf16
@settings(max_examples=15)
def test_every_suggestion_is_accepted(line, gib):
    assert_suggestions_are_accepted(line, gib)


# 37 s: every command line is planned, and layers are traced for its model and sizes.
@pytest.mark.slow
@pytest.mark.nightly
@given(line=command_lines(), gib=GIBS)
@settings(max_examples=50)
def test_every_suggestion_for_many_command_lines_is_accepted(line, gib):
    assert_suggestions_are_accepted(line, gib)


def assert_suggestions_are_accepted(line: str, gib: float | None) -> None:
    """The settings that a refusal names are accepted; without any, no mesh is."""
    config = config_of(line)
    try:
        choose_plan(config, devices(config, gib))
    except PlanError as error:
        alternatives = suggestions_in(str(error))
        for alternative in alternatives:
            assert_accepted(config, alternative, gib)
        if not alternatives:
            free = config.with_values({"parallel": {}})
            for axes in axis_sizes(devices(config).num_devices):
                refusal(free.with_values({"parallel.mesh": str(axes)}), gib)


def test_resuming_without_stages_suggests_settings_to_clear():
    """The settings of its schedule come from the config of the run, so leaving them out of the
    command is not enough."""
    before = config_of(
        NANO + "--mesh pipe=2,data=4 --schedule interleaved --set parallel.repeats=2 --set"
        " parallel.layers_per_stage=1,1,1,1 --set parallel.send_slack=true --set"
        " parallel.stage_residuals=recompute --microbatches 2"
    )
    choose_plan(before, devices(before))
    resumed = lambda line: resumed_config(before.to_json(), None, settings_in(line))  # noqa: E731
    alternatives = suggestions_in(refusal(resumed("--mesh tensor=8"), fixed=FIXED_FOR_A_RUN))
    leave_out = next(alternative for alternative in alternatives if "--mesh" not in alternative)
    assert sorted(settings_in(leave_out).items()) == [
        ("parallel.layers_per_stage", ""),
        ("parallel.repeats", "none"),
        ("parallel.send_slack", "false"),
        ("parallel.stage_residuals", "auto"),
        ("schedule", "auto"),
    ]
    for alternative in alternatives:
        other = resumed(f"--mesh tensor=8 {alternative}")
        choose_plan(other, devices(other))


def test_resumed_run_is_not_told_to_change_fixed_settings():
    before = config_of(NANO + "--mesh data=8 --global-batch 24")
    assert any(
        "--global-batch" in alternative
        for alternative in suggestions_in(refusal(before.with_values({"parallel.microbatches": 2})))
    )
    resumed = resumed_config(before.to_json(), None, {"microbatches": "2"})
    alternatives = suggestions_in(refusal(resumed, fixed=FIXED_FOR_A_RUN))
    assert alternatives
    assert not any("--global-batch" in alternative for alternative in alternatives)


def test_bf16_moments_are_suggested_last_and_not_on_resume():
    config = config_of("--model gpt2-nano --cpu-devices 1 --global-batch 1")
    needed = choose_plan(config, devices(config)).memory
    gib = next(
        gib
        for part in range(1, 100)
        if (gib := needed.total * part / 100 / GIB) and fits_with_moments_in(config, "bf16", gib)
    )
    assert not fits_with_moments_in(config, "f32", gib)
    assert suggestions_in(refusal(config, gib)) == ["--set precision.moments=bf16"]
    assert (
        "split"
        not in refusal(config, gib).partition("with fully sharded state")[0].partition("do:")[2]
    ), "there is nothing to split over"
    assert not suggestions_in(refusal(config, gib, fixed=SAVED_WITH_A_RUN))
    assert not suggestions_in(refusal(config.with_values({"optimizer.beta2": 0.999}), gib)), (
        "bf16 cannot follow it"
    )


def fits_with_moments_in(config: Config, moments: str, gib: float) -> bool:
    try:
        choose_plan(config.with_values({"precision.moments": moments}), devices(config, gib))
    except PlanError:
        return False
    return True


@pytest.mark.parametrize(
    ("line", "fixed"),
    [
        (
            (
                "--model gpt2-nano --cpu-devices 7 --mesh data=7 --global-batch 1 --set"
                " model.num_layers=1 --set model.mlp_dim=1000 --set model.vocab_size=5"
                " --microbatches 3"
            ),
            None,
        ),
        (
            "--model gpt2-xl --cpu-devices 2 --mesh data=2 --remat full",
            "--global-batch 16 --mesh data=2 --remat full",
        ),
    ],
)
def test_refusal_without_suggestions_lists_the_fixed_settings(line, fixed):
    text = refusal(config_of(line), gib=1.0)
    if fixed is None:
        assert suggestions_in(text)
    else:
        assert text.endswith(f"no similar setting works while these are fixed: {fixed}")


def test_distant_suggestion_leaves_other_settings_open():
    config = config_of(
        "--model gpt2-nano --cpu-devices 512 --mesh pipe=512 --microbatches 7 --schedule"
        " interleaved --remat full"
    )
    alternatives = suggestions_in(refusal(config))
    assert alternatives == ["--mesh pipe=4,data=16,tensor=8 --microbatches none --schedule auto"]
    assert_accepted(config, alternatives[0])


@pytest.mark.parametrize(
    "line",
    [
        NANO + "--schedule 1f1",
        NANO + "--set parallel.rules=mpl=none",
        NANO + "--schedule no-such-file.json",
        NANO + "--set parallel.attention=cudnn",
    ],
)
def test_unreadable_settings_get_no_suggestions(line):
    config = config_of(line)
    with pytest.raises(PlanError) as caught:
        check_settings(config, devices(config))
    assert refusal(config) == str(caught.value)


def test_schedule_table_of_another_pipeline_gets_suggestions(tmp_path):
    (tmp_path / "own.json").write_text(make_schedule("1f1b", 4, 6).to_json())
    config = config_of(
        f"{NANO}--mesh pipe=2,data=4 --global-batch 48 --microbatches 3 --schedule"
        f" {tmp_path / 'own.json'}"
    )
    alternatives = suggestions_in(refusal(config))
    assert alternatives[0] == "--schedule auto"
    assert "--mesh pipe=4,data=2 --microbatches none" in alternatives
    for alternative in alternatives:
        assert_accepted(config, alternative)


def test_suggestions_contain_no_unnecessary_change():
    """The plan is accepted only with both changes, so both are suggested and nothing else."""
    config = config_of(NANO + "--mesh data=8 --zero 1 --microbatches 4")
    tried = []

    def accepts(other: Config, topology: Topology) -> None:
        tried.append(other)
        if other.parallel.zero or other.parallel.microbatches not in (2, None):
            raise PlanError("no")

    found = nearest_accepted(config, devices(config), accepts)
    assert found == [{"parallel.zero": 0, "parallel.microbatches": 2}]
    assert len(tried) == len(set(tried)), "each is tried once"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"parallel.mesh": "data=2", "parallel.repeats": None},
            "--mesh data=2 --set parallel.repeats=none",
        ),
        (
            {"parallel.layers_per_stage": (), "parallel.send_slack": False},
            "--set parallel.layers_per_stage= --set parallel.send_slack=false",
        ),
        (
            {"cpu_devices": 3, "parallel.rules": ("heads=none", "mlp=none")},
            "--cpu-devices 3 --set parallel.rules=heads=none,mlp=none",
        ),
    ],
)
def test_suggested_flags_parse_into_the_changes(changes, text):
    assert typed(changes) == text
    base = config_of(
        NANO + "--set parallel.repeats=3 --set parallel.layers_per_stage=1,3 --set"
        " parallel.send_slack=true"
    )
    assert make_config(None, settings_in(text), base) == base.with_values(changes)
