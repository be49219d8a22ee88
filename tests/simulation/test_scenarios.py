"""Scenarios: files of users are parsed or refused with the field's name, and the timeline has the
right conditions at every time.
"""

import json
import math

import pytest
from simulated import PRICING, scenario

from optimus_jax.errors import ConfigError
from optimus_jax.planning.profiles.cluster import OLD_LINK_NAMES
from optimus_jax.simulation.named_scenarios import find_scenario, library, read_scenario
from optimus_jax.simulation.scenarios import Scenario
from optimus_jax.simulation.timeline import RAMP_LEVELS, ClusterConditions, Timeline


def timeline(*events, seed=0, began_s=None, num_devices=16):
    return Timeline(
        scenario(*events),
        num_devices=num_devices,
        devices_per_host=8,
        horizon_s=1000.0,
        seed=seed,
        began_s=began_s,
    )


@pytest.mark.parametrize("name", library())
def test_scenarios_of_the_library_survive_json(name):
    assert Scenario.from_json(library()[name].to_json()) == library()[name]


def test_the_library_has_the_promised_scenarios():
    assert {
        "stationary",
        "short",
        "wrong-prior",
        "link-quarter",
        "link-flapping",
        "straggler-10-minutes",
        "straggler-for-ever",
        "memory-pressure",
        "longer-sequences",
        "batch-ramp",
        "device-lost",
        "host-lost-in-switch",
        "lying-metrics",
        "missing-metrics",
        "host-slow-15-minutes",
        "two-hosts-slow",
        "host-drift",
        "costly-switch-default-start",
        "costly-switch-link-quarter",
        "frozen-before-straggler",
        "frozen-during-straggler",
        "frozen-skew",
        "late-longer-sequences",
        "wrong-memory-prior",
        "link-improves",
    } <= set(library())
    quarter = library()["link-quarter"].events[0]
    assert (quarter.factor, quarter.for_s) == (0.25, 24 * 60)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "x", "event": []}, r"scenario.event'[\s\S]*did you mean 'events'"),
        (
            {"name": "x", "events": [{"kind": "lnk", "factor": 0.5}]},
            r"events\[0\] is of no known kind[\s\S]*did you mean 'link'",
        ),
        (
            {"name": "x", "events": [{"kind": "link", "factr": 0.5}]},
            r"events\[0\] is not complete[\s\S]*give factor",
        ),
        (
            {"name": "x", "events": [{"kind": "link", "factor": 0.5, "for": 3}]},
            r"unknown setting 'events\[0\].for'",
        ),
        ({"name": "x", "events": [{"kind": "link", "factor": 0}]}, "factor must be positive"),
        (
            {"name": "x", "events": [{"kind": "link", "factor": "half"}]},
            r"events\[0\].factor has the wrong type",
        ),
        (
            {"name": "x", "events": [{"kind": "link", "factor": 0.5, "start_s": -1}]},
            "cannot be negative",
        ),
        (
            {"name": "x", "events": [{"kind": "link", "factor": 0.5, "for_s": 9, "every_s": 5}]},
            "repetitions of",
        ),
        ({"name": "x", "events": [{"kind": "memory", "share": 1.5}]}, "is a share"),
        ({"name": "x", "events": [{"kind": "lost"}]}, "which devices are lost"),
        (
            {
                "name": "x",
                "events": [
                    {"kind": "phase", "start_share": 0.5},
                    {"kind": "phase", "start_share": 0.2},
                ],
            },
            "in rising order",
        ),
        ({"name": "x", "events": [{"kind": "data", "wait_s": -5}]}, "wait_s cannot be negative"),
        (
            {
                "name": "x",
                "events": [{"kind": "metrics", "names": ["*"], "fault": "lying", "factor": -3}],
            },
            "factor must be positive",
        ),
        (
            {"name": "x", "events": [{"kind": "switch", "phase": "move", "count": -1}]},
            "count must be positive",
        ),
        *[
            (
                {"name": "x", "events": [{"kind": "metrics", "names": names, "fault": "stale"}]},
                r"events\[0\].names has the wrong type",
            )
            for names in ([["a"]], [None], {"a": 1})
        ],
        *[
            (
                {"name": "x", "events": [{"kind": "link", "factor": 0.5, "link": link}]},
                r"unknown value for events\[0\].link",
            )
            for link in ([], {}, None)
        ],
        ({"name": "x", "prior": {"inter_host": 0}}, "inter_host must be positive"),
        ({"name": "x", "prior": {"memory": 0}}, "memory must be positive"),
        ({"name": "x", "switching": {"cost_factor": 0}}, "cost_factor must be positive"),
        ({"name": "x", "misfit": {"links": 2.0}}, "misfit.links is a share"),
        ({"name": "x", "misfit": {"rates": -1}}, "rates cannot be negative"),
        ({"name": "x", "switching": {"compile_s": -1}}, "compile_s cannot be negative"),
        (
            {"name": "x", "switching": {"checkpoint_every_s": 0}},
            "checkpoint_every_s must be positive",
        ),
        ({"name": "x", "steps": 0}, "at least one step"),
        (
            {"name": "x", "misfit": {"link": 0.1}},
            r"scenario.misfit.link[\s\S]*did you mean 'links'",
        ),
        ({"events": []}, "give name"),
        ([], "a JSON object"),
    ],
)
def test_invalid_scenarios_are_refused_with_the_field_name(value, message):
    with pytest.raises(ConfigError, match=message):
        Scenario.from_json(json.dumps(value))


@pytest.mark.parametrize(("old", "new"), OLD_LINK_NAMES.items())
def test_earlier_names_of_links_are_read(old, new):
    def read(link):
        return Scenario.from_json(
            json.dumps(
                {
                    "name": "x",
                    "prior": {link: 0.5},
                    "events": [
                        {"kind": "link", "link": link, "factor": 0.25},
                        {"kind": "metrics", "names": [f"link_slowdown/{link}"], "fault": "stale"},
                    ],
                }
            )
        )

    assert read(old) == read(new)
    assert getattr(read(old).prior, new) == 0.5


def test_scenario_files_are_read_by_path_and_by_name(tmp_path):
    (tmp_path / "mine.json").write_text('{"name": "mine", "duration_s": 60}')
    assert read_scenario(tmp_path / "mine.json").duration_s == 60
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json is not JSON"):
        read_scenario(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_scenario(tmp_path / "none.json")
    assert find_scenario(str(tmp_path / "mine.json")).name == "mine"
    assert find_scenario("link-quarter") == library()["link-quarter"]
    with pytest.raises(ConfigError, match="did you mean 'link-quarter'"):
        find_scenario("link-quarters")


def test_models_have_positions_for_the_longest_phase():
    configs = library()["longer-sequences"].configs(PRICING.config)
    assert [(share, config.seq_len, config.data.global_batch) for share, config in configs] == [
        (0.0, 2048, 1024),
        (0.33, 8192, 256),
        (0.67, 32768, 64),
    ]
    assert {config.model.max_length for _, config in configs} == {32768}


def test_signals_of_the_slowest_process_are_those_of_every_process_now():
    fault = {"kind": "metrics", "names": ["process_skew", "mfu", "straggler"], "fault": "missing"}
    read = Scenario.from_json(json.dumps({"name": "x", "duration_s": 60, "events": [fault]}))
    assert read.events[0].names == ("process_time/*", "mfu")


def test_an_event_holds_from_start_to_end():
    line = timeline({"kind": "link", "factor": 0.25, "start_s": 100, "for_s": 50})
    assert line.at(99.9) == line.at(150.0) == ClusterConditions()
    assert line.at(100.0) == line.at(149.9) == ClusterConditions(inter_host=0.25)
    assert line.end_s(line.index(120.0)) == 150.0
    assert line.end_s(line.index(500.0)) == math.inf


def test_effects_of_simultaneous_events_combine():
    line = timeline(
        {"kind": "link", "factor": 0.5},
        {"kind": "link", "factor": 0.5, "start_s": 10},
        {"kind": "link", "link": "intra_host", "factor": 0.8},
        {"kind": "compute", "factor": 1.5, "devices": [3]},
        {"kind": "compute", "factor": 1.2, "host": 0, "start_s": 10},
        {"kind": "memory", "share": 0.5},
        {"kind": "memory", "share": 0.5, "start_s": 10},
        {"kind": "data", "wait_s": 0.2},
    )
    assert line.at(0.0) == ClusterConditions(
        inter_host=0.5, intra_host=0.8, slow=((3, 1.5),), taken=0.5, wait_s=0.2
    )
    late = line.at(10.0)
    assert (late.inter_host, late.taken, dict(late.slow)[3], len(late.slow)) == (
        0.25,
        0.75,
        pytest.approx(1.8),
        8,
    )


def test_a_flapping_event_repeats_until_it_stops():
    line = timeline(
        {"kind": "link", "factor": 0.25, "start_s": 100, "for_s": 20, "every_s": 40, "until_s": 200}
    )
    slow = [time_s for time_s in range(0, 400, 10) if line.at(time_s).inter_host < 1]
    assert slow == [100, 110, 140, 150, 180, 190]


def test_jitter_depends_on_the_seed():
    event = {
        "kind": "link",
        "factor": 0.25,
        "start_s": 100,
        "for_s": 20,
        "every_s": 60,
        "jitter": 0.3,
    }
    assert timeline(event).bounds_s == timeline(event).bounds_s != timeline(event, seed=1).bounds_s
    assert timeline(event).bounds_s[1] == 100.0


def test_a_ramp_grows_to_its_full_size():
    line = timeline({"kind": "memory", "share": 0.6, "start_s": 100, "ramp_s": 80, "for_s": 200})
    taken = [line.at(100 + 10 * level).taken for level in range(RAMP_LEVELS)]
    assert taken == pytest.approx(
        [0.6 * level / RAMP_LEVELS for level in range(1, RAMP_LEVELS + 1)]
    )
    assert (line.at(299).taken, line.at(300).taken) == (0.6, 0.0)


def test_a_long_ramp_grows_in_small_levels():
    """A host that becomes slower by 1% a minute does so by 2.5% at a time."""
    drift = next(iter(library()["host-drift"].events))
    line = Timeline(
        library()["host-drift"], num_devices=16, devices_per_host=8, horizon_s=9000.0, seed=0
    )

    def slow(minute):
        return dict(line.at(60 * minute).slow).get(8, 1.0)

    assert (slow(4.9), slow(84.9)) == (1.0, drift.factor)
    for minute in (10, 30, 50, 70):
        assert slow(minute) == pytest.approx(1.01 ** (minute - 5), rel=0.026)
        assert slow(minute + 2.5) / slow(minute) == pytest.approx(1.01**2.5, rel=1e-3)


def test_lost_devices_are_reported_early_if_there_is_notice():
    line = timeline(
        {"kind": "lost", "devices": [3, 99], "host": 1, "start_s": 100, "for_s": 50, "notice_s": 30}
    )
    gone = frozenset({3, *range(8, 16)})
    assert (line.at(69).reported, line.at(70).reported, line.at(150).reported) == (
        frozenset(),
        gone,
        frozenset(),
    )
    assert (line.at(99).lost, line.at(100).lost, line.at(150).lost) == (
        frozenset(),
        gone,
        frozenset(),
    )


def test_a_loss_may_happen_early_during_a_switch_phase():
    event = {"kind": "lost", "devices": [3], "start_s": 100, "for_s": 50, "during": "move"}
    early = timeline(event, began_s={scenario(event).events[0]: 40.0})
    assert [time_s for time_s in range(0, 200, 10) if early.at(time_s).lost] == [40, 50, 60, 70, 80]
