"""What training takes follows from the predicted tokens per second; clusters are compared alike."""

import json
from dataclasses import replace

import pytest
from in_process import run_in_process

from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.planning.api import find_plans, search_plans
from optimus_jax.planning.cluster_comparison import compare_clusters
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.layouts import Rejection
from optimus_jax.planning.training_cost import (
    TrainingCost,
    compact,
    parse_prices,
    parse_tokens,
    price_of,
)

SMALL = {"mesh": "data=8", "microbatches": 1, "remat": "none", "zero": 0}
"""A search that takes no time."""


def test_time_hours_price_and_energy_are_products():
    prediction = replace(find_plans("gpt2", "h100:8", **SMALL)[0].prediction, tokens_per_s=1e6)
    cost = TrainingCost.of(8.64e12, prediction, Cluster.parse("h100:8"), 2.5)
    assert cost.time_s == 8.64e6
    assert cost.days == 100
    assert cost.device_hours == pytest.approx(8 * 2400)
    assert cost.price == pytest.approx(8 * 2400 * 2.5)
    assert cost.energy_kwh == pytest.approx(8 * 2400 * 0.7)
    text = cost.describe()
    assert text == (
        "8.64T tokens: 100 d, 19,200 device-hours, 48,000 to pay, at most 13.4 MWh of the devices"
    )
    unknown = replace(cost, price=None, energy_kwh=None)
    assert unknown.describe() == "8.64T tokens: 100 d, 19,200 device-hours"
    little = TrainingCost.of(1e9, prediction, Cluster.parse("h100:8"), 2.5)
    assert little.describe() == (
        "1B tokens: 0.28 h, 2.2 device-hours, 5.6 to pay, at most 0.0016 MWh of the devices"
    )


def test_each_phase_has_its_tokens_and_the_last_one_the_rest():
    flags = ["--model", "gpt2", "--cluster", "h100:8", "--mesh", "data=8", "--seq-len", "128"]
    flags += ["--global-batch", "8", "--phases", "200:64", "--tokens"]

    def listed(tokens):
        found = run_in_process("plan", *flags, tokens, "--top", "1", "--json")
        [plan] = json.loads(found.stdout)
        return plan

    plan, first = listed("1e9"), 200 * 8 * 128
    (later,) = plan["later_phases"]
    assert later["tokens_per_s"] > 2 * plan["tokens_per_s"]
    expected = first / plan["tokens_per_s"] + (1e9 - first) / later["tokens_per_s"]
    assert plan["training"]["time_s"] == pytest.approx(expected)
    plan = listed("1000")
    assert plan["training"]["time_s"] == pytest.approx(1000 / plan["tokens_per_s"])


@pytest.mark.parametrize(
    ("text", "number"),
    [("15T", 15e12), ("300b", 3e11), ("1.5e12", 1.5e12), ("7 M", 7e6), ("12", 12.0), ("2k", 2e3)],
)
def test_numbers_of_tokens_have_a_unit(text, number):
    assert parse_tokens(text) == number
    assert parse_tokens(compact(number)) == number
    assert compact(999.96e9) == "1T"


@pytest.mark.parametrize("text", ["", "many", "-3B", "0", "1e999", "3Q", "T"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(ConfigError, match=r"(?s)given:.*do:.*15T"):
        parse_tokens(text)


def test_a_price_is_of_one_kind_of_device_or_of_all():
    prices = parse_prices(["h100=2.5", "3"])
    assert price_of(prices, Cluster.parse("h100:8")) == 2.5
    assert price_of(prices, Cluster.parse("b200:8")) == 3
    assert price_of(parse_prices(["h100=2.5"]), Cluster.parse("b200:8")) is None
    with pytest.raises(ConfigError, match="unknown accelerator 'h10'"):
        parse_prices(["h10=2.5"])
    for wrong in (["dear"], ["h100="], ["-1"], ["1", "2"], ["nan"], ["h100=1", "H100=2"]):
        with pytest.raises(ConfigError, match=r"(?s)given:.*do:"):
            parse_prices(wrong)


def test_clusters_have_the_same_batch():
    found = compare_clusters("gpt2", ["h100:8", "a100:4"], overrides={"data.seq_len": 128})
    assert [each.name for each in found] == ["h100:8", "a100:4"]
    assert {each.found.config.data.global_batch for each in found} == {64}
    times = [each.found.plans[0].step_time_s for each in found]
    assert times[0] < times[1]
    only = {"data.global_batch": 2}
    found = compare_clusters("llama3.3-70b", ["l4:2", "b200:2x8"], overrides=only)
    assert found[0].found is None
    assert "no layout of llama3.3-70b fits l4 devices" in found[0].why_not
    assert found[1].found is not None
    with pytest.raises(PlanError, match="fits l4 devices"):
        compare_clusters("llama3.3-70b", ["l4:2"], overrides=only)


def test_the_command_prints_a_comparison_and_what_training_takes():
    flags = ["--model", "gpt2", "--global-batch", "64", "--seq-len", "128", "--tokens", "300B"]
    prices = ["--price", "h100=2.5", "2"]
    shown = run_in_process("plan", *flags, "--compare", "h100:8", "a100:8", *prices)
    assert shown.returncode == 0, shown.stderr
    for text in ("device-hours", "h100:8", "a100:8", "to train on 300B tokens", "MWh"):
        assert text in shown.stdout
    listed = json.loads(
        run_in_process("plan", *flags, "--compare", "h100:8", "a100:8", *prices, "--json").stdout
    )
    assert [each["cluster"] for each in listed] == ["h100:8", "a100:8"]
    for each, price in zip(listed, (2.5, 2), strict=True):
        training = each["training"]
        assert training["time_s"] == pytest.approx(300e9 / each["tokens_per_s"])
        assert training["price"] == pytest.approx(training["device_hours"] * price)
    one = run_in_process("plan", *flags, "--cluster", "h100:8", "--top", "1")
    assert "plan 1, 300B tokens: " in one.stdout
    assert "to pay" not in one.stdout


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--cluster", "h100:8", "--price", "2"], "needs a number of tokens"),
        (["--cluster", "a100:8", "--tokens", "1T", "--price", "h100=2"], "not planned for"),
        (["--cluster", "h100:8", "--compare", "a100:8"], "--compare with --cluster"),
        (["--compare", "a100:8", "--explain", "1"], "--compare with --explain"),
        (["--compare", "a100:8", "--top", "3"], "--compare with --top"),
        (["--cluster", "h100:8", "--tokens", "many"], "write it as 15T"),
    ],
)
def test_flags_that_have_no_use_together_are_refused(flags, text):
    ended = run_in_process("plan", "--model", "gpt2", *flags)
    assert ended.returncode == 2
    assert text in ended.stderr


@pytest.mark.parametrize("columns", [80, 100, 139])
def test_a_narrow_table_has_whole_words(columns, monkeypatch):
    from optimus_jax.cli import plan_output

    monkeypatch.setattr(plan_output, "PIPED_WIDTH", columns)
    flags = ["--model", "llama3-8b", "--cluster", "h100:8x8", "--top", "4"]
    shown = run_in_process("plan", *flags).stdout
    assert max(map(len, shown.partition("train with:")[0].splitlines())) <= columns
    table, _, below = shown.partition("plan 1: ")
    below = f"plan 1: {below}"
    for plan in find_plans("llama3-8b", "h100:8x8", top=4):
        assert f"{plan.prediction.tokens_per_s:,.0f}" in table
        for size in str(plan.axes).split(","):
            assert size in table
        assert f"plan {plan.rank}: " in below


def test_a_narrow_comparison_has_its_meshes_below(monkeypatch):
    from optimus_jax.cli import plan_output

    monkeypatch.setattr(plan_output, "PIPED_WIDTH", 80)
    clusters = ["h100:16x8", "h200:16x8", "b200:8x8"]
    flags = ["--model", "llama3-8b", "--compare", *clusters, "--tokens", "15T", "--price", "2.50"]
    shown = run_in_process("plan", *flags, "--json")
    listed = json.loads(shown.stdout)
    shown = run_in_process("plan", *flags).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for cluster, each in zip(clusters, listed, strict=True):
        assert f"{each['tokens_per_s']:,.0f}" in shown
        assert f"{each['training']['price']:,.0f}" in shown
        sizes = [f"{axis}={size}" for axis, size in each["axes"].items() if size > 1]
        assert f"{cluster}: {','.join(sizes)}" in shown


def test_rejected_layouts_stand_below_their_reason(capsys):
    from optimus_jax.cli.plan_output import show_rejected

    found = search_plans("gpt2", "h100:8", top=1, overrides=SMALL)
    illegal = [Rejection(layouts=f"tensor={n}", reason="of the heads") for n in (3, 5, 5, 6, 7)]
    large = [Rejection(layouts=f"data={n}", reason=f"needs {n}", needs_bytes=n) for n in (9, 8)]
    show_rejected(replace(found, rejections=(*illegal, *large)))
    assert capsys.readouterr().out.splitlines()[:8] == [
        "not, because of the heads:",
        "  tensor=3",
        "  tensor=5",
        "  tensor=6",
        "  and 1 more",
        "too large:",
        "  data=8: needs 8",
        "  data=9: needs 9",
    ]
