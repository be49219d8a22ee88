"""A Plan survives JSON, has a digest, and refuses what cannot be trained, with the condition it
violates.

The settings that are suggested instead are tested in tests/planning/test_suggestions.py.
"""

import dataclasses
import json
import math

import plans as listed
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import axis_sizes, models, plans

from optimus_jax.config import Config, DataConfig, ModelConfig, ParallelConfig
from optimus_jax.config.axes import MESH_AXES, AxisSizes, check_devices
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.pipeline.gpipe import forward_only
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.plan import Plan
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.planning.search.suggestions import NAMED

MODEL = listed.GPT
PLAN = listed.make_plan(
    listed.make_config(MODEL, listed.case("data=2,fsdp=4", zero=3, microbatches=2))
)
DEEP = dataclasses.replace(MODEL, num_layers=10)
PIPELINED = listed.make_plan(
    listed.make_config(DEEP, listed.case("pipe=4,data=2", schedule="interleaved", microbatches=4))
)
assert PIPELINED.pipeline is not None


@given(axes=axis_sizes())
def test_axis_sizes_multiply_to_the_devices_and_survive_text(axes):
    assert axes.num_devices == math.prod(axes[axis] for axis in MESH_AXES)
    assert AxisSizes.parse(str(axes)) == axes
    check_devices(axes, axes.num_devices)


@given(data=st.data())
def test_plan_survives_json(data):
    plan = data.draw(plans(data.draw(models())))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.digest == plan.digest


def test_a_plan_keeps_its_digest_when_a_field_is_added():
    """Plans of runs from before 2026-11-28 lack these fields; their journals name the digests."""
    fields = json.loads(PLAN.to_json()).keys()
    later = {"kept_layers", "overlap", "scatter"}
    assert later.isdisjoint(fields)
    assert Plan.from_json(PLAN.to_json()) == PLAN
    other = dataclasses.replace(PLAN, overlap="layers")
    assert json.loads(other.to_json()).keys() - fields == {"overlap"}
    assert Plan.from_json(other.to_json()) == other
    assert other.digest != PLAN.digest


@given(data=st.data())
def test_another_plan_has_another_digest(data):
    model = data.draw(models())
    first, second = data.draw(plans(model)), data.draw(plans(model))
    assert (first.digest == second.digest) == (first == second)


@pytest.mark.parametrize("case", listed.PLANS, ids=str)
def test_the_listed_plans_differ_and_cover_their_devices(case):
    plan = listed.make_plan(listed.make_config(listed.model_for(case, "gpt"), case))
    assert 1 < plan.num_devices == case.axes.num_devices <= 8
    assert [other for other in listed.PLANS if other == case] == [case]


def test_listed_plans_cover_all_kinds_of_settings():
    made = [
        listed.make_plan(listed.make_config(listed.model_for(case, "gpt"), case))
        for case in listed.PLANS
    ]
    three = {
        (p.axes.data, p.axes.fsdp, p.axes.tensor)
        for p in made
        if p.num_devices == 8 and p.axes.pipe == 1
    }
    assert len(three) == 10, "ordered factorisations of eight into three"
    assert {p.zero for p in made if p.axes.fsdp > 1} == {0, 1, 2, 3}
    assert {p.microbatches for p in made} >= {1, 2, 4}
    assert {p.remat for p in made} == {"none", "selective", "dots", "full"}
    assert {p.zero for p in made if p.axes.data > 1 and p.axes.fsdp > 1} >= {1, 2, 3}, "hybrid"
    for tensor, splits in ((2, True), (4, False), (8, False)):
        rules = [p.active_rules(listed.LLAMA) for p in made if p.axes.tensor == tensor]
        assert {"kv_heads" in active for active in rules if "heads" in active} == {splits}
    pipelined = [(p, p.pipeline) for p in made if p.pipeline is not None]
    assert {(p.axes.pipe, pipeline.schedule) for p, pipeline in pipelined} >= {
        (pipe, schedule) for pipe in (2, 4, 8) for schedule in ("1f1b", "gpipe", "interleaved")
    }
    assert {p.zero for p, _ in pipelined if p.axes.fsdp > 1} >= {1, 2, 3}
    assert {p.remat for p, _ in pipelined} == {"none", "selective", "dots", "full"}
    for field in ("keep_residuals", "send_slack"):
        assert {getattr(pipeline, field) for _, pipeline in pipelined} == {True, False}
    assert {len(set(pipeline.layers_per_stage)) > 1 for _, pipeline in pipelined} == {True, False}
    assert {p.microbatches < p.axes.pipe for p, _ in pipelined} == {True, False}


def assert_refused(
    message: str, *, global_batch: int = 48, model: ModelConfig = MODEL, **changes: object
) -> None:
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(PLAN, **changes).validate(model, global_batch=global_batch)  # type: ignore[arg-type]


def test_plan_that_the_refusals_vary_is_legal():
    PLAN.validate(MODEL, global_batch=48)


def test_stages_and_a_schedule_need_each_other():
    assert_refused(
        r"exactly if it has pipeline stages(.|\n)*pipe=2", axes=AxisSizes(pipe=2, fsdp=4)
    )
    assert_refused(r"exactly if it has pipeline stages(.|\n)*pipe=1", pipeline=PIPELINED.pipeline)


@pytest.mark.parametrize("layers", [(2, 1, 1, 1, 1, 1, 1, 1), (1,) * 10, (3, 1, 1, 1, 1, 1, 2, 0)])
def test_stages_that_do_not_share_the_layers_are_refused(layers):
    with pytest.raises(
        PlanError,
        match=(
            r"share the 10 layers of test-gpt(.|\n)*for pipe=4 x repeats=2(.|\n)*give 8 numbers"
            r" above 0 whose sum is 10"
        ),
    ):
        pipelined(layers_per_stage=layers).validate(DEEP, global_batch=48)


def pipelined(
    *, microbatches: int = 4, axes: AxisSizes = PIPELINED.axes, **changes: object
) -> Plan:
    """PIPELINED with other microbatches, axes or pipelining."""
    assert PIPELINED.pipeline is not None
    pipeline = dataclasses.replace(PIPELINED.pipeline, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(PIPELINED, axes=axes, microbatches=microbatches, pipeline=pipeline)


@pytest.mark.parametrize(
    ("microbatches", "global_batch", "message"),
    [
        (
            6,
            48,
            (
                r"needs a multiple of the stages(.|\n)*microbatches=6, pipe=4(.|\n)*choose a number"
                r" that 4 divides, or a schedule that visits each device once$"
            ),
        ),
        (2, 16, r"needs a multiple of the stages"),
        (
            8,
            24,
            (
                r"does not divide evenly(.|\n)*global_batch=24 over data\*fsdp=2 x"
                r" microbatches=8(.|\n)*choose a global batch that 16 divides$"
            ),
        ),
    ],
)
def test_microbatches_that_do_not_suit_interleaving_are_refused(
    microbatches, global_batch, message
):
    with pytest.raises(PlanError, match=message):
        pipelined(microbatches=microbatches).validate(DEEP, global_batch=global_batch)


def own_table(**counts: int) -> str:
    return make_schedule("1f1b", **({"num_stages": 4, "num_microbatches": 4} | counts)).to_json()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            own_table(num_stages=2),
            r"'1f1b' is for another pipeline(.|\n)*given: pipe=4, microbatches=4, repeats=1(.|\n)*"
            r"use pipe=2, microbatches=4 and repeats=1, or another table",
        ),
        (own_table(num_microbatches=8), r"use pipe=4, microbatches=8 and repeats=1"),
        (
            make_schedule("interleaved", 4, 8, 2).to_json(),
            r"use pipe=4, microbatches=8 and repeats=2",
        ),
        (forward_only(4, 4).to_json(), r"'forward' does not train(.|\n)*'backward'"),
    ],
)
def test_tables_of_another_pipeline_are_refused(table, message):
    plan = pipelined(table=table, repeats=1, layers_per_stage=(3, 3, 2, 2))
    with pytest.raises(PlanError, match=message):
        plan.validate(DEEP, global_batch=48)


def test_send_slack_needs_a_table_of_latency_2():
    plan = pipelined(table=own_table(), repeats=1, layers_per_stage=(3, 3, 2, 2), send_slack=True)
    with pytest.raises(
        PlanError,
        match=r"a table with latency 1(.|\n)*use a table with latency 2, or no send_slack",
    ):
        plan.validate(DEEP, global_batch=48)
    assert plan.pipeline is not None
    dataclasses.replace(
        plan, pipeline=dataclasses.replace(plan.pipeline, table=own_table(latency=2))
    ).validate(DEEP, global_batch=48)


def test_zero_without_fsdp_is_refused():
    assert_refused(
        r"zero=3 splits over mesh axis 'fsdp', which has one device(.|\n)*use two devices or more"
        r" along fsdp, or zero=0",
        axes=AxisSizes(data=4),
    )


def test_zero_without_embed_is_refused():
    rules = tuple(rule for rule in PLAN.rules if rule[0] != "embed")
    assert_refused(
        r"zero=3 splits 'embed' over mesh axis 'fsdp', and a rule keeps it whole(.|\n)*use zero=0,"
        r" or no rule for 'embed'",
        rules=rules,
    )
    dataclasses.replace(PLAN, rules=rules, zero=0).validate(MODEL, global_batch=48)


def test_global_batch_that_does_not_divide_evenly_is_refused():
    assert_refused(
        r"global_batch=24 over data\*fsdp=8 x microbatches=2(.|\n)*choose a global batch that 16"
        r" divides$",
        global_batch=24,
    )


def test_a_dimension_that_cannot_be_split_is_refused():
    assert_refused(
        r"'embed' of test-gpt (.|\n)*embed_dim=50 over fsdp=4",
        model=dataclasses.replace(MODEL, embed_dim=50),
    )


def test_meshes_of_another_size_are_refused():
    with pytest.raises(
        PlanError,
        match=(
            r"needs 6 devices; this run has 8(.|\n)*--mesh fsdp=2,tensor=3(.|\n)*axis sizes whose"
            r" product is 8"
        ),
    ):
        check_devices(AxisSizes(tensor=3, fsdp=2), 8)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("dta=2", r"unknown mesh axis 'dta'(.|\n)*--mesh dta=2(.|\n)*did you mean 'data'"),
        ("data=2,x=3", r"unknown mesh axis 'x'(.|\n)*choose one of: pipe, data, fsdp, tensor"),
        ("", r"unknown mesh axis ''"),
        ("data=two", r"'data' needs one whole number(.|\n)*data=two"),
        ("data=2,data=4", r"'data' needs one whole number(.|\n)*write each axis once"),
        ("data", r"'data' needs one whole number"),
        ("data=-1", r"'data' needs one whole number"),
        ("data=0", r"'data' needs at least one device(.|\n)*data=0"),
    ],
)
def test_meshes_that_cannot_be_read_are_refused(mesh, message):
    with pytest.raises(PlanError, match=message):
        AxisSizes.parse(mesh)


@pytest.mark.parametrize(
    "change",
    [
        {"zero": "3"},
        {"zero": 2.0},
        {"microbatches": True},
        {"remat": "some"},
        {"precision": "fp8"},
        {"axes": {"dat": 2}},
        {"axes": {"data": 0}},
        {"rules": 3},
        {"surprise": 1},
    ],
)
def test_json_with_an_invalid_field_is_refused(change):
    value = json.loads(PLAN.to_json()) | change
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(value))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"axes": 1}'])
def test_json_that_is_no_plan_is_refused(text):
    with pytest.raises(PlanError, match="this is not a plan"):
        Plan.from_json(text)


def topology(num_devices: int, gigabytes: float | None) -> Topology:
    return Topology(
        num_devices=num_devices,
        num_processes=1,
        platform="cpu",
        device_kind="cpu",
        bytes_per_device=None if gigabytes is None else int(gigabytes * 2**30),
    )


@given(model=models(), num_devices=st.integers(1, 8), zero=st.sampled_from((None, 0, 1, 2, 3)))
def test_chosen_plan_is_legal(model, num_devices, zero):
    config = Config(
        model=model,
        data=DataConfig(seq_len=16, global_batch=num_devices * 2),
        parallel=ParallelConfig(zero=zero),
    )
    try:
        choice = choose_plan(config, topology(num_devices, None))
    except PlanError as error:
        assert "do: " in str(error)  # noqa: PT017
    else:
        choice.plan.validate(model, global_batch=num_devices * 2)
        assert choice.plan.num_devices == num_devices
        assert zero is None or choice.plan.zero == zero, "what was asked is done or refused"
        assert choice.why


def config_of(
    mesh: str, *, model: ModelConfig = MODEL, global_batch: int = 48, **parallel: object
) -> Config:
    return Config(
        model=model,
        data=DataConfig(seq_len=16, global_batch=global_batch),
        parallel=ParallelConfig(mesh=mesh, **parallel),
    )  # type: ignore[arg-type]


def chosen_plan(config: Config) -> Plan:
    return choose_plan(
        config, topology(AxisSizes.parse(config.parallel.mesh).num_devices, None)
    ).plan


@pytest.mark.parametrize(
    ("mesh", "parallel", "given"),
    [
        ("pipe=4,data=2", {"schedule": "interleaved"}, "num_layers=6, pipe=4 x repeats=2"),
        ("pipe=2,data=4", {"repeats": 4}, "num_layers=6, pipe=2 x repeats=4"),
        ("pipe=8", {}, "num_layers=6, pipe=8"),
    ],
)
def test_more_stages_than_layers_are_refused(mesh, parallel, given):
    with pytest.raises(
        PlanError,
        match=rf"fewer layers than there are stages(.|\n)*{given}\n(.|\n)*use 6 stages at most",
    ):
        chosen_plan(config_of(mesh, model=dataclasses.replace(MODEL, num_layers=6), **parallel))


@pytest.mark.parametrize(
    ("mesh", "parallel", "message"),
    [
        ("pipe=3", {"schedule": "1f1"}, r"unknown schedule '1f1'(.|\n)*did you mean '1f1b'"),
        ("pipe=3", {"schedule": "atuo"}, r"unknown schedule 'atuo'(.|\n)*did you mean 'auto'"),
        (
            "data=2",
            {"schedule": "zigzag"},
            (
                r"unknown schedule 'zigzag'(.|\n)*choose one of: auto, gpipe, 1f1b, interleaved"
                r" \(or name a table"
            ),
        ),
        ("pipe=3", {"schedule": "none"}, r"stages need a schedule(.|\n)*use a schedule, or pipe=1"),
        (
            "pipe=3",
            {"schedule": "1f1b", "repeats": 2},
            (
                r"'1f1b' visits each device once(.|\n)*repeats=2(.|\n)*use repeats=1, or schedule"
                r" interleaved"
            ),
        ),
        (
            "data=2",
            {"schedule": "gpipe", "stage_residuals": "recompute"},
            r"no pipeline stages(.|\n)*schedule, stage_residuals on mesh data=2",
        ),
    ],
)
def test_impossible_schedules_are_refused(mesh, parallel, message):
    with pytest.raises(PlanError, match=message):
        chosen_plan(config_of(mesh, **parallel))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read(.|\n)*own.json: No such file(.|\n)*auto, gpipe, 1f1b, interleaved"),
        (b"\xff\xfe\x00", r"cannot be read(.|\n)*own.json: not text"),
        (b"stages: 4", r"--schedule .*own.json: this schedule is not JSON"),
        (b"{}", r"--schedule .*own.json: the schedule has no 'name'"),
        (
            own_table(num_microbatches=8).encode(),
            r"another pipeline(.|\n)*use pipe=4, microbatches=8 and repeats=1, or another table",
        ),
    ],
)
def test_files_that_hold_no_table_for_this_pipeline_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "own.json").write_bytes(content)
    with pytest.raises(PlanError, match=message):
        chosen_plan(config_of("pipe=2,data=2", model=DEEP, schedule=str(tmp_path / "own.json")))


def test_schedule_file_becomes_part_of_the_plan_with_its_numbers(tmp_path):
    table = make_schedule("interleaved", 2, 6, 3)
    (tmp_path / "own.json").write_text(table.to_json())
    plan = chosen_plan(config_of("pipe=2,data=2", model=DEEP, schedule=str(tmp_path / "own.json")))
    assert plan.schedule() == table
    assert plan.pipeline is not None
    assert (plan.microbatches, plan.pipeline.repeats) == (6, 3)
    (tmp_path / "own.json").unlink()
    assert Plan.from_json(plan.to_json()).schedule() == table


def test_given_microbatches_are_not_replaced_by_a_tables(tmp_path):
    (tmp_path / "own.json").write_text(own_table(num_microbatches=6))
    with pytest.raises(PlanError, match=r"given: pipe=4, microbatches=3"):
        chosen_plan(
            config_of(
                "pipe=4,data=2", model=DEEP, schedule=str(tmp_path / "own.json"), microbatches=3
            )
        )


def test_stages_that_do_not_fit_get_suggestions():
    config = config_of("pipe=4", model=DEEP, microbatches=12, remat="none", stage_residuals="keep")
    kept = choose_plan(config, topology(4, None)).memory.total / 2**30
    with pytest.raises(PlanError, match=r"does not fit") as caught:
        choose_plan(config, topology(4, kept))
    options = str(caught.value).partition(NAMED)[2].split(" or ")
    assert "--set parallel.stage_residuals=auto" in options


def test_model_that_does_not_fit_whole_is_split():
    config = Config(model=MODEL, data=DataConfig(seq_len=16, global_batch=8))
    plenty = choose_plan(config, topology(8, 1.0))
    assert str(plenty.plan.axes) == "data=8"
    scarce = choose_plan(config, topology(8, plenty.memory.total / 2**30))
    assert str(scarce.plan.axes) == "fsdp=8"
    assert scarce.plan.zero == 3
    assert scarce.memory.total < plenty.memory.total
    with pytest.raises(
        PlanError, match=r"does not fit(.|\n)*parameters(.|\n)*use more devices or a smaller model"
    ):
        choose_plan(config, topology(8, scarce.memory.total / 2**30 / 8))
