"""Candidates for a switch: the devices left after a loss, and the switch method of each plan."""

from dataclasses import replace

import pytest
from fleet import CLUSTER, CONFIG, PRICING, plan_on, ranked

from optimus_jax.config.axes import AxisSizes
from optimus_jax.control.deciding.candidates import (
    Searches,
    is_allowed,
    leaving_out,
    switch_method_of,
)
from optimus_jax.errors import PlanError

PLAN = plan_on("fsdp=64", microbatches=2)


@pytest.mark.parametrize(
    ("other", "switch_method"),
    [
        (replace(PLAN, microbatches=4), "executable"),
        (replace(PLAN, remat="none"), "executable"),
        (replace(PLAN, zero=1), "remesh"),
        (plan_on("data=2,fsdp=32"), "remesh"),
        (plan_on("pipe=2,fsdp=32"), "remesh"),
    ],
)
def test_the_switch_method_depends_on_what_has_to_change(other, switch_method):
    assert switch_method_of(PLAN, other, same_devices=True) == switch_method
    assert switch_method_of(PLAN, other, same_devices=False) == "subset"
    assert switch_method_of(PLAN, other, same_devices=False, same_hosts=False) == "restart"


def test_another_schedule_of_the_same_stages_moves_no_state():
    staged = plan_on("pipe=2,fsdp=32")
    assert staged.pipeline is not None
    assert (
        switch_method_of(
            staged,
            replace(staged, pipeline=replace(staged.pipeline, schedule="gpipe")),
            same_devices=True,
        )
        == "executable"
    )
    assert (
        switch_method_of(
            staged,
            replace(staged, pipeline=replace(staged.pipeline, layers_per_stage=(15, 17))),
            same_devices=True,
        )
        == "rebalance"
    )


@pytest.mark.parametrize(("lost", "hosts"), [({11}, 7), ({11, 12}, 7), ({0, 63}, 6)])
def test_hosts_with_lost_devices_are_left_out(lost, hosts):
    (first, without), *others = leaving_out(CLUSTER, frozenset(lost), CONFIG)
    assert (first.num_hosts, first.devices_per_host) == (hosts, 8)
    assert lost <= without
    assert len(without) == 64 - first.num_devices
    assert [cluster.num_hosts for cluster, _ in others] == sorted(
        [cluster.num_hosts for cluster, _ in others], reverse=True
    )


def test_on_one_host_only_the_lost_devices_are_left_out():
    one = replace(CLUSTER, num_hosts=1, inter_host=None)
    found = list(leaving_out(one, frozenset({2}), CONFIG))
    assert [(cluster.devices_per_host, sorted(without)) for cluster, without in found][:2] == [
        (7, [2]),
        (6, [2, 7]),
    ]


def test_sizes_that_no_layout_divides_over_are_skipped():
    """127 hosts would have to be 127 stages, of 32 layers."""
    many = replace(CLUSTER, num_hosts=128)
    sizes = [cluster.num_hosts for cluster, _ in leaving_out(many, frozenset({0}), CONFIG)]
    assert sizes[0] == 124  # 4 that divide, times 31 stages
    assert len(sizes) <= 3


def test_one_remaining_host_has_no_inter_host_link():
    found = list(leaving_out(replace(CLUSTER, num_hosts=2), frozenset({0}), CONFIG))
    assert [(cluster.num_hosts, cluster.inter_host) for cluster, _ in found] == [(1, None)]


def test_the_allow_list_permits_only_its_meshes():
    assert is_allowed(PLAN, ())
    assert is_allowed(PLAN, (AxisSizes(data=8, tensor=8), AxisSizes(fsdp=64)))
    assert not is_allowed(PLAN, (AxisSizes(data=8, tensor=8),))


def test_a_search_runs_once_and_is_asked_again_until_it_answers():
    answers, asked = [False, True], []

    def searcher(pricing):
        asked.append(pricing)
        answer = answers.pop(0)
        return ranked(pricing, [PLAN]) if answer else None

    searches = Searches(searcher)
    assert searches.best("key", PRICING) is None
    assert searches.best("key", PRICING) == [PLAN]
    assert searches.best("key", PRICING) == [PLAN]
    assert len(asked) == 2


def test_fixed_settings_without_a_legal_plan_give_no_candidates():
    def searcher(pricing):
        raise PlanError("the mesh needs 64 devices")

    assert Searches(searcher).best("key", PRICING) == []
