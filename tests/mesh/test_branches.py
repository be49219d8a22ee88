"""Branches that are taken in some iterations of a loop only."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import matmuls
from jax import lax

from optimus_jax.mesh.branches import ordered_after, run_when, share_taken
from optimus_jax.planning.ahead_of_time.hlo import HloProgram

SIZE = 8
SOME = np.array([True, False, True, True, False])
ROWS = np.arange(len(SOME) * SIZE * SIZE, dtype=np.float32).reshape(-1, SIZE, SIZE) / 100


def squares(rows, taken, *, keeps_total):
    """The sum of some matrices' squares, and each square."""

    def body(total, row):
        matrix, now = row
        return run_when(
            now,
            lambda: (total + matrix @ matrix, matrix @ matrix),
            (total, None) if keeps_total else None,
            iterations=taken,
        )

    return lax.scan(body, jnp.zeros_like(rows[0]), (rows, jnp.asarray(taken)))


@pytest.mark.parametrize("keeps_total", [True, False])
def test_results_elsewhere_are_those_given_or_zeros(keeps_total):
    total, each = squares(ROWS, SOME, keeps_total=keeps_total)
    expected = np.where(SOME[:, None, None], ROWS @ ROWS, 0)
    np.testing.assert_allclose(each, expected, rtol=1e-6)
    # The last iteration is not taken.
    np.testing.assert_allclose(total, expected.sum(0) if keeps_total else 0 * total, rtol=1e-6)


@pytest.mark.parametrize("taken", [SOME, SOME | True], ids=["some", "all"])
def test_compiled_programs_say_how_often_a_branch_is_taken(taken):
    step = jax.jit(lambda rows: squares(rows, taken, keeps_total=True))
    text = step.lower(ROWS).compile().as_text() or ""
    assert (" conditional(" in text) == (not taken.all())
    once = 2 * SIZE**3
    assert HloProgram(text).dot_flops() % (once * taken.sum()) == 0
    assert sum(each.total_flops for each in matmuls(text)) == HloProgram(text).dot_flops()
    assert once * taken.sum() <= HloProgram(text).dot_flops() <= 2 * once * taken.sum()


def test_where_stages_differ_the_first_ones_iterations_count():
    taken = np.array([[True, False], [True, True], [False, True]])

    def body(total, row):
        matrix, now = row
        (square,) = run_when(now, lambda: (matrix @ matrix,), iterations=taken)
        return total + square, None

    text = (
        jax.jit(lambda rows, now: lax.scan(body, jnp.zeros_like(rows[0]), (rows, now)))
        .lower(ROWS[:3], taken[:, 1])
        .compile()
        .as_text()
    )
    assert HloProgram(text or "").dot_flops() == 2 * SIZE**3 * 2


def test_only_branches_of_this_kind_have_a_share():
    assert share_taken("jit(step)/while/body/8_of_11_times/cond") == Fraction(8, 11)
    assert share_taken("8_of_11_times") == Fraction(8, 11)
    assert share_taken("jit(step)/8_of_11_times/branch_1_fun/while/body/cond") is None


@pytest.mark.parametrize("number", [0.0, -0.0, np.inf, np.nan, 1e-45])
def test_what_is_ordered_stays_as_it_is_and_depends_on_the_other(number):
    values = {"row": np.array([1.0, -0.0, np.nan], np.float32), "count": np.arange(3)}
    earlier = jnp.full((2, 2), number)
    jax.tree.map(np.testing.assert_array_equal, ordered_after(values, earlier), values)
    compiled = jax.jit(ordered_after).lower(values, earlier).compile().as_text() or ""
    assert "popcnt" in compiled, "or a compiler pass knows that the condition holds"
