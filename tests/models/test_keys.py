"""Random keys come from one function, which names their generator; draws are the same under every
plan, whatever JAX's settings.
"""

import ast
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE

import optimus_jax
from optimus_jax.inference.sampling import Sampling, draw
from optimus_jax.models.keys import make_key

OTHER_SETTINGS = {
    "jax_default_prng_impl": "rbg",
    "jax_random_seed_offset": 7,
    "jax_enable_custom_prng": True,
    "jax_legacy_prng_key": "error",
    "jax_high_dynamic_range_gumbel": True,
}
PACKAGE = Path(optimus_jax.__file__).parent


@pytest.fixture
def other_jax_settings():
    """JAX with other settings of keys and draws."""
    before = {name: jax.config.values[name] for name in OTHER_SETTINGS}
    for name, value in OTHER_SETTINGS.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, getattr(value, "value", value))


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**32 - 1])
def test_key_equals_that_of_jax_with_default_settings(seed):
    expected = jax.random.key(seed)
    assert make_key(seed).dtype == expected.dtype
    np.testing.assert_array_equal(
        jax.random.key_data(make_key(seed)), jax.random.key_data(expected)
    )
    np.testing.assert_array_equal(
        jax.random.key_data(jax.jit(make_key)(jnp.uint32(seed))), jax.random.key_data(expected)
    )


def first_losses(case):
    """Losses of the first two steps from initial weights, with dropout."""
    model = replace(plans.LLAMA, num_layers=1, embed_dim=16, num_heads=4, mlp_dim=32)
    built = plans.build(model, case)
    state, losses = built.program.init(jnp.int32(3)), []
    step = plans.compiled_step(built)
    for number in (1, 2):
        state, metrics = step(state, plans.batch_of_step(built.program, number))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.fixture
def expected_losses():
    """With JAX's default settings, on one device."""
    return first_losses(plans.ONE_DEVICE)


def test_weights_and_dropout_are_the_same_under_another_default_generator(
    expected_losses, other_jax_settings
):
    assert first_losses(plans.case("data=2,tensor=2")) == pytest.approx(
        expected_losses, rel=F32_RELATIVE
    )


def test_samples_are_the_same_under_another_default_generator(request):
    def sampled():
        keys = jax.vmap(lambda number: jax.random.fold_in(make_key(5), number))(jnp.arange(64))
        return np.asarray(draw(jnp.zeros((64, 50)), keys, jnp.full(64, 7), Sampling()))

    expected = sampled()
    request.getfixturevalue("other_jax_settings")
    np.testing.assert_array_equal(sampled(), expected)


def keys_made_elsewhere(source: str) -> list[int]:
    """Lines that make a key without naming its generator."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "jax.random":
            found.append(node.lineno)
        if not isinstance(node, ast.Call):
            continue
        name, keywords = (
            ast.unparse(node.func),
            {keyword.arg: keyword.value for keyword in node.keywords},
        )
        makes = name.rpartition(".")[2] in ("key", "PRNGKey", "seed") and "random" in name.split(
            "."
        )
        wraps = name.endswith("wrap_key_data") and "impl" not in keywords
        # A stream of flax is given a key, never a number from which it would make one.
        streams = name.rpartition(".")[2] == "Rngs" and (
            node.args or any(isinstance(value, ast.Constant) for value in keywords.values())
        )
        if makes or wraps or streams:
            found.append(node.lineno)
    return found


def test_no_other_code_makes_a_key():
    assert keys_made_elsewhere(
        "jax.random.key(0)\nrandom.PRNGKey(1)\nnnx.Rngs(0)\nnnx.Rngs(params=0)\n"
        "jax.random.wrap_key_data(x)\nfrom jax.random import key"
    ) == [6, 1, 2, 3, 4, 5]
    files = sorted(PACKAGE.rglob("*.py")) + sorted((PACKAGE.parent / "scripts").glob("*.py"))
    assert {
        str(file): lines for file in files if (lines := keys_made_elsewhere(file.read_text()))
    } == {}
