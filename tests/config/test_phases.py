"""Phases continue the examples of every sequence length without a gap, and a run without phases is
unchanged.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config import Config, PhaseConfig
from optimus_jax.config.phases import in_phase, phase_after, phases_of
from optimus_jax.errors import ConfigError


def config_of(text, **data):
    return Config().with_values(
        {"data.seq_len": 128, "data.phases": text}
        | {f"data.{name}": value for name, value in data.items()}
    )


def test_values_that_a_phase_leaves_open_stay():
    phases = phases_of(config_of("200:64, 400:x512,500:32x128"))
    assert [
        (
            phase.steps_before,
            phase.last_step,
            phase.global_batch,
            phase.seq_len,
            phase.examples_before,
        )
        for phase in phases
    ] == [
        (0, 200, 16, 128, 0),
        (200, 400, 64, 128, 200 * 16),
        (400, 500, 64, 512, 0),
        (500, None, 32, 128, 200 * 16 + 200 * 64),
    ]


def test_a_run_without_phases_has_one():
    config = Config()
    [phase] = phases_of(config)
    assert (phase.steps_before, phase.last_step, phase.examples_before) == (0, None, 0)
    assert in_phase(config, phase) is config


@st.composite
def ramps(draw):
    steps = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5, unique=True).map(sorted))
    pairs = st.tuples(
        st.one_of(st.none(), st.integers(1, 9)), st.one_of(st.none(), st.sampled_from([16, 32]))
    ).filter(any)
    return config_of(
        tuple(
            PhaseConfig(after_step=step, global_batch=batch, seq_len=length)
            for step, (batch, length) in zip(
                steps, draw(st.lists(pairs, min_size=len(steps), max_size=len(steps))), strict=True
            )
        )
    )


@given(config=ramps())
def test_each_example_of_a_sequence_length_is_used_once(config):
    """From step to step the numbers of a sequence length's examples continue, whatever phases lie
    between.
    """
    examples_so_far: dict[int, int] = {}
    for step in range(1, 71):
        phase = phase_after(config, step - 1)
        assert phase.steps_before < step <= (phase.last_step or step)
        first = phase.examples_before + (step - 1 - phase.steps_before) * phase.global_batch
        assert first == examples_so_far.get(phase.seq_len, 0)
        examples_so_far[phase.seq_len] = first + phase.global_batch
        own = in_phase(config, phase)
        assert (own.data.global_batch, own.seq_len, own.data.phases) == (
            phase.global_batch,
            phase.seq_len,
            (),
        )


@given(config=ramps())
def test_phases_survive_json_and_the_command_line(config):
    assert Config.from_json(config.to_json()) == config
    assert config.with_values({"data.phases": ",".join(map(str, config.data.phases))}) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("200", "AFTER_STEP:BATCHxTOKENS"),
        ("64@200", "AFTER_STEP:BATCHxTOKENS"),
        ("200:", "changes nothing"),
        ("0:64", "after_step must be positive"),
        ("200:0", "global_batch must be positive"),
        ("200:64,200:32", "follow one another"),
        ("200:64,100:32", "follow one another"),
        (
            "200:64x4096",
            r"exceeds the longest(.|\n)*data.phases=200:64x4096(.|\n)*model.max_length=4096",
        ),
    ],
)
def test_invalid_phases_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        config_of(text)
