"""Training programs that the runs of a test file share: equal ones are traced and compiled once.

A program holds nothing of a run, so runs cannot tell. A file shares them by importing the fixture
`shared_programs`; a test that uses `own_programs` does not. No file may share them that replaces
parts of the model or of the step.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from optimus_jax.config import Config
from optimus_jax.control import executables
from optimus_jax.models.families import BLOCKS, FAMILIES
from optimus_jax.plan import Plan
from optimus_jax.planning.trials import trial
from optimus_jax.run import program as run
from optimus_jax.run import whole_run
from optimus_jax.training.optimizer import effective_warmup, optimizer_named, peak_learning_rate
from optimus_jax.training.step import Program, build_program
from optimus_jax.training.tasks import task_of

BUILDERS = (whole_run, run, executables, trial)
"""Modules that build the programs of runs."""
NOT_COMPILED = (
    "parallel",  # the plan has what comes of it
    "evaluation",
    "checkpoint",
    "log",
    "distributed",
    "faults",
    "controller",
    "store",
    "export",
    "recipe",
    "steps",
    "init_from",
    "adapters_from",
    "eval_every",
    "eval_batches",
    "control",
    "cpu_devices",
)
"""Settings on which nothing depends that is compiled."""


def compiled_settings(program: Program) -> Config:
    """The settings on which the functions of a program depend, with values derived at the start of
    a run.
    """
    config, default = program.config, Config()
    return replace(
        config,
        model=replace(config.model, name=default.model.name),
        data=replace(
            config.data,
            sources=default.data.sources,
            tokenizer=default.data.tokenizer,
            chat_template=None,
            allow_change=False,
            seq_len=config.seq_len,
        ),
        optimizer=replace(
            config.optimizer,
            lr=peak_learning_rate(config.optimizer, program.shapes.num_params),
            warmup_steps=effective_warmup(config),
            decay_steps=config.decay_steps,
        ),
        precision=replace(config.precision, compute=default.precision.compute),
        **{name: getattr(default, name) for name in NOT_COMPILED},
    )


class SharedPrograms:
    """Builds programs of which equal ones have the same jitted functions."""

    def __init__(self) -> None:
        self._first: dict[Hashable, tuple[Program, Any]] = {}

    def build(self, config: Config, plan: Plan, devices: Sequence[Any] | None = None) -> Program:
        """`build_program`, with the functions of the first program that was equal."""
        program = build_program(config, plan, devices)
        rows = (
            task_of(config),
            optimizer_named(config.optimizer.name),
            FAMILIES[config.model.family],
            BLOCKS.get(config.model.family),
        )
        key = (
            compiled_settings(program),
            plan,
            tuple(program.mesh.devices.flat),
            tuple(map(id, rows)),
        )
        first, _ = self._first.setdefault(key, (program, rows))
        return replace(
            program,
            init=first.init,
            train_step=first.train_step,
            eval_step=first.eval_step,
            next_tokens=first.next_tokens,
        )


@pytest.fixture(scope="module", autouse=True)
def shared_programs() -> Iterator[None]:
    """The runs of this file share programs."""
    with pytest.MonkeyPatch.context() as patch:
        programs = SharedPrograms()
        for module in BUILDERS:
            patch.setattr(module, "build_program", programs.build)
        yield


@pytest.fixture
def own_programs() -> Iterator[None]:
    """Every run of this test compiles its own program."""
    with pytest.MonkeyPatch.context() as patch:
        for module in BUILDERS:
            patch.setattr(module, "build_program", build_program)
        yield
