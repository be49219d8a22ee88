"""A Plan survives JSON, has a name, and refuses what cannot be trained with the nearest that can."""

import dataclasses
import json
import math

import plans as listed
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import axis_sizes, models, plans

from optimus_jax.config import Config, DataConfig, ModelConfig, ParallelConfig
from optimus_jax.errors import PlanError
from optimus_jax.mesh.axes import MESH_AXES, AxisSizes
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan, check_devices
from optimus_jax.planning.search import choose_plan

MODEL = listed.GPT
PLAN = listed.make_plan(listed.make_config(MODEL, listed.case("data=2,fsdp=4", zero=3, microbatches=2)))


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


@given(data=st.data())
def test_another_plan_has_another_digest(data):
    model = data.draw(models())
    first, second = data.draw(plans(model)), data.draw(plans(model))
    assert (first.digest == second.digest) == (first == second)


@pytest.mark.parametrize("case", listed.PLANS, ids=str)
def test_the_listed_plans_differ_and_cover_their_devices(case):
    plan = listed.make_plan(listed.make_config(MODEL, case))
    assert 1 < plan.num_devices == case.axes.num_devices <= 8
    assert [other for other in listed.PLANS if other == case] == [case]


def test_the_list_has_what_it_promises():
    made = [listed.make_plan(listed.make_config(MODEL, case)) for case in listed.PLANS]
    three = {(p.axes.data, p.axes.fsdp, p.axes.tensor) for p in made if p.num_devices == 8 and p.axes.pipe == 1}
    assert len(three) == 10, "ordered factorisations of eight into three"
    assert {p.zero for p in made if p.axes.fsdp > 1} == {0, 1, 2, 3}
    assert {p.microbatches for p in made} >= {1, 2, 4}
    assert {p.remat for p in made} == {"none", "selective", "dots", "full"}
    assert {p.zero for p in made if p.axes.data > 1 and p.axes.fsdp > 1} >= {1, 2, 3}, "hybrid"
    for tensor, splits in ((2, True), (4, False), (8, False)):
        rules = [p.active_rules(listed.LLAMA) for p in made if p.axes.tensor == tensor]
        assert {"kv_heads" in active for active in rules if "heads" in active} == {splits}


def validate(message: str, *, global_batch: int = 48, model: ModelConfig = MODEL, **changes: object) -> None:
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(PLAN, **changes).validate(model, global_batch=global_batch)  # type: ignore[arg-type]


def test_what_the_refusals_begin_from_is_legal():
    PLAN.validate(MODEL, global_batch=48)


def test_pipeline_stages_are_refused():
    validate(r"pipeline stages are not built yet(.|\n)*pipe=3, schedule=none(.|\n)*pipe=1", axes=AxisSizes(pipe=3, fsdp=2))
    validate(r"pipeline stages are not built yet(.|\n)*schedule=1f1b", schedule="1f1b")


def test_zero_without_fsdp_is_refused():
    validate(r"zero=3 splits over mesh axis 'fsdp', which has one device(.|\n)*use fsdp=4 in place of data=4", axes=AxisSizes(data=4))
    validate(r"zero=1 splits over(.|\n)*fsdp=2 or more, or --zero 0", axes=AxisSizes(tensor=4), zero=1)


def test_zero_without_embed_is_refused():
    rules = tuple(rule for rule in PLAN.rules if rule[0] != "embed")
    validate(r"zero=3 splits 'embed' over mesh axis 'fsdp', and a rule keeps it whole", rules=rules)
    dataclasses.replace(PLAN, rules=rules, zero=0).validate(MODEL, global_batch=48)


def test_a_batch_that_cannot_be_dealt_out_is_refused():
    validate(r"global_batch=24 over data\*fsdp=8 x microbatches=2(.|\n)*--global-batch 16 or 32, or data\*fsdp=6 or 12", global_batch=24)
    validate(r"global_batch=5 over(.|\n)*--global-batch 16$", global_batch=5)


def test_a_dimension_that_cannot_be_split_is_refused():
    validate(r"'embed' of test-gpt (.|\n)*embed_dim=50 over fsdp=4", model=dataclasses.replace(MODEL, embed_dim=50))


@pytest.mark.parametrize(("mesh", "num_devices", "message"), [
    ("data=4", 8, r"needs 4 devices; this run has 8(.|\n)*set data=8(.|\n)*--cpu-devices 4"),
    ("data=4,tensor=2", 4, r"needs 8 devices; this run has 4(.|\n)*set data=2"),
    ("tensor=3", 8, r"needs 3 devices; this run has 8(.|\n)*pipe\*fsdp\*tensor=2 or 4"),
    ("tensor=16", 8, r"pipe\*fsdp\*tensor=8 and data for the rest"),
])
def test_meshes_of_another_size_are_refused(mesh, num_devices, message):
    with pytest.raises(PlanError, match=message):
        check_devices(AxisSizes.parse(mesh), num_devices)


@pytest.mark.parametrize(("mesh", "message"), [
    ("dta=2", r"unknown mesh axis 'dta'(.|\n)*--mesh dta=2(.|\n)*did you mean 'data'"),
    ("data=2,x=3", r"unknown mesh axis 'x'(.|\n)*choose one of: pipe, data, fsdp, tensor"),
    ("", r"unknown mesh axis ''"),
    ("data=two", r"'data' needs one whole number(.|\n)*data=two"),
    ("data=2,data=4", r"'data' needs one whole number(.|\n)*write each axis once"),
    ("data", r"'data' needs one whole number"),
    ("data=-1", r"'data' needs one whole number"),
    ("data=0", r"'data' needs at least one device(.|\n)*data=0"),
])
def test_meshes_that_cannot_be_read_are_refused(mesh, message):
    with pytest.raises(PlanError, match=message):
        AxisSizes.parse(mesh)


@pytest.mark.parametrize("change", [
    {"zero": "3"}, {"zero": 2.0}, {"microbatches": True}, {"remat": "some"}, {"precision": "fp8"}, {"axes": {"dat": 2}},
    {"axes": {"data": 0}}, {"rules": 3}, {"surprise": 1}])
def test_what_is_not_a_plan_is_refused(change):
    value = json.loads(PLAN.to_json()) | change
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(value))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"axes": 1}'])
def test_what_is_not_even_like_a_plan_is_refused(text):
    with pytest.raises(PlanError, match="this is not a plan"):
        Plan.from_json(text)


def topology(num_devices: int, gigabytes: float | None) -> Topology:
    return Topology(num_devices=num_devices, num_processes=1, platform="cpu", device_kind="cpu",
                    bytes_per_device=None if gigabytes is None else int(gigabytes * 2**30))


@given(model=models(), num_devices=st.integers(1, 8), zero=st.sampled_from((None, 0, 1, 2, 3)))
def test_what_is_chosen_is_legal(model, num_devices, zero):
    config = Config(model=model, data=DataConfig(seq_len=16, global_batch=num_devices * 2), parallel=ParallelConfig(zero=zero))
    try:
        choice = choose_plan(config, topology(num_devices, None))
    except PlanError as error:
        assert "do: " in str(error)  # noqa: PT017
    else:
        choice.plan.validate(model, global_batch=num_devices * 2)
        assert choice.plan.num_devices == num_devices
        assert zero is None or choice.plan.zero == zero, "what was asked is done or refused"
        assert choice.why


def test_a_model_that_does_not_fit_whole_is_split():
    config = Config(model=MODEL, data=DataConfig(seq_len=16, global_batch=8))
    plenty = choose_plan(config, topology(8, 1.0))
    assert str(plenty.plan.axes) == "data=8"
    scarce = choose_plan(config, topology(8, plenty.memory.total / 2**30))
    assert str(scarce.plan.axes) == "fsdp=8"
    assert scarce.plan.zero == 3
    assert scarce.memory.total < plenty.memory.total
    with pytest.raises(PlanError, match=r"does not fit(.|\n)*parameters(.|\n)*no layout of this model fits"):
        choose_plan(config, topology(8, scarce.memory.total / 2**30 / 8))
