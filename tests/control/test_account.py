"""What switches cost and save, and which risk is allowed."""

import math

import pytest

from optimus_jax.control.deciding.account import Account

PLAN, OTHER = "pipe=2", "data=8"


def _steps(
    account: Account[str],
    circumstances: str,
    level: float | None,
    num_steps: int,
    *,
    expected_s: float | None = None,
    used: str = OTHER,
) -> None:
    expected = None if expected_s is None else lambda plan: math.log(expected_s)
    account.stepped(circumstances, level, num_steps, used=used, expected=expected)


def test_a_saving_pays_for_its_switch_and_for_no_later_one():
    account = Account[str](share=0.01)
    assert account.allowance.allows_s(1000.0) == pytest.approx(10.0)
    account.charge(8.0)
    account.left(PLAN, "normal", math.log(2.0))
    assert account.allowance.allows_s(1000.0) == pytest.approx(2.0)
    _steps(account, "normal", math.log(1.5), 10)  # saves 5 s
    assert account.allowance.allows_s(1000.0) == pytest.approx(7.0)
    _steps(account, "normal", math.log(1.5), 1000)
    assert account.allowance.allows_s(1000.0) == pytest.approx(10.0)
    account.charge(12.0)
    assert account.allowance.owed_s == pytest.approx(12.0)
    assert account.allowance.allows_s(1000.0) == pytest.approx(0.1), "no risk"
    assert account.spent_s == 20.0


def test_only_steps_in_the_circumstances_of_the_switch_count():
    account = Account[str](share=0.01)
    account.charge(8.0)
    account.left(PLAN, "slow link", math.log(2.0))
    _steps(account, "normal", math.log(0.5), 100)
    _steps(account, "slow link", None, 100)
    assert account.allowance.owed_s == 8.0


def test_a_plan_that_proves_slower_adds_to_what_is_owed():
    account = Account[str](share=0.01)
    account.left(PLAN, "normal", math.log(1.0))
    _steps(account, "normal", math.log(1.5), 10)
    assert account.allowance.owed_s == pytest.approx(5.0)


def test_savings_are_relative_to_the_first_plan_that_was_left():
    account = Account[str](share=0.01)
    account.charge(10.0)
    account.left(PLAN, "normal", math.log(2.0))
    account.left(PLAN, "normal", math.log(1.0))
    _steps(account, "normal", math.log(1.0), 4)
    assert account.allowance.owed_s == pytest.approx(6.0)


def test_a_refusal_names_the_share_that_allows_the_risk():
    allowance = Account(share=0.01).allowance
    told = allowance.refused(3.55, 100.0)
    assert "may lose 3.55 s on average" in told
    assert "the account allows 1 s of them" in told
    assert told.endswith("--set controller.budget_share=0.036 allows it")
    assert "allows it" not in allowance.refused(200.0, 100.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_costs_that_are_negative_or_not_finite_are_ignored(wrong):
    account = Account[str](share=0.01)
    account.charge(2.0)
    account.charge(wrong)
    assert (account.allowance.owed_s, account.spent_s) == (2.0, 2.0)


def test_a_plan_that_had_to_be_left_is_no_measure_for_the_next():
    account = Account[str](share=0.01)
    account.left(PLAN, "normal", math.log(1.0))
    account.forget()
    _steps(account, "normal", math.log(2.0), 100)
    assert account.allowance.owed_s == 0.0


def test_what_is_expected_of_a_plan_is_not_remembered_as_what_one_took():
    account = Account[str](share=0.01)
    account.charge(30.0)
    account.left(PLAN, "normal", math.log(2.0))
    _steps(account, "slow", math.log(1.0), 10, expected_s=3.0)
    assert account.allowance.owed_s == pytest.approx(10.0)
    account.left(OTHER, "slow", math.log(1.0))
    _steps(account, "slow", math.log(1.5), 10, expected_s=3.0)
    assert account.allowance.owed_s == pytest.approx(15.0), "the plan that was left counts"


def test_what_is_expected_of_the_first_plan_is_asked_once():
    account = Account[str](share=0.01)
    account.charge(50.0)
    account.left(PLAN, "normal", math.log(2.0))
    _steps(account, "slow", math.log(1.0), 10, expected_s=3.0)
    _steps(account, "slow", math.log(1.0), 10, expected_s=9.0)
    assert account.allowance.owed_s == pytest.approx(10.0)


@pytest.mark.parametrize("under", ["the first plan", "a plan, with the first one forgotten"])
def test_steps_are_compared_with_another_plan_only(under):
    account = Account[str](share=0.01)
    account.charge(30.0)
    account.left(PLAN, "normal", math.log(2.0))
    if under != "the first plan":
        account.forget_first()
    used = PLAN if under == "the first plan" else OTHER
    _steps(account, "slow", math.log(1.0), 10, expected_s=3.0, used=used)
    assert account.allowance.owed_s == 30.0
