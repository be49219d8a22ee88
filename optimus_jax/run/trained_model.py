"""A trained model that runs forward only: what is named, its settings, and its devices. `evaluate`
measures it, and `predict` asks it for labels.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from optimus_jax.cluster.distributed import connect, is_writer, named
from optimus_jax.cluster.launch_detection import find_launch
from optimus_jax.config import Config
from optimus_jax.config.run_checkpoint import RunCheckpoint
from optimus_jax.devices.cpu import disable_compilation_cache_on_cpu, use_cpu_devices
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, explain
from optimus_jax.run.named_run import RUN
from optimus_jax.run.parameter_source import RunSource, parameter_source
from optimus_jax.system.paths import UserPath
from optimus_jax.weights.published import PublishedSource
from optimus_jax.weights.published_adapters import PublishedAdapters

EXAMPLES_PER_DEVICE = 8
"""Default number of examples of a batch for each device."""
KEPT = (
    "model",
    "data",
    "task",
    "masking",
    "patch_masking",
    "augmentation",
    "preference",
    "evaluation",
    "precision",
    "seed",
)
"""Settings of a run that say what its evaluations measure."""
ALL = 2**31 - 1
"""As a number of examples: all that there are."""
FORWARD_ONLY: Mapping[str, Any] = {
    "steps": 1,
    "eval_every": 1,
    "eval_batches": None,
    "optimizer.name": "sgd",  # one moment for each parameter, which nothing reads
    "optimizer.lr": 1.0,
}
"""Settings with which the plan is chosen."""


def trained_source(
    model: UserPath, step: int | None
) -> tuple[PublishedSource | RunSource, PublishedAdapters | None]:
    """The run or the published model that is named, at a step; and the adapters, if they are named.

    Raises ConfigError if another step is named beside it, or it has none.
    """
    adapters = PublishedAdapters.parse(str(model), what=RUN)
    source = parameter_source(str(model)) if adapters is None else adapters.published_base()
    if step is None:
        return source, adapters
    if isinstance(source, PublishedSource):
        raise ConfigError(
            explain(
                "a published model has no checkpoints",
                given=f"{RUN} {source} with --step {step}",
                do="leave --step out",
            )
        )
    if source.named.step not in (None, step):
        raise ConfigError(
            explain("two steps are named", given=f"{source.named} and step {step}", do="name one")
        )
    return RunSource(RunCheckpoint(source.named.run, step)), adapters


def settings_of(source: RunSource) -> Config:
    """The settings of a run on which its evaluations depend."""
    settings = source.settings()
    config = replace(Config(), **{name: getattr(settings, name) for name in KEPT})
    return replace(
        config,
        data=replace(config.data, phases=(), allow_change=False),
        evaluation=replace(config.evaluation, seq_len=settings.eval_seq_len),
    )


@contextmanager
def connected(config: Config) -> Iterator[None]:
    """Context in which this process is connected with the others, if there are some."""
    launch = find_launch(config.distributed, on_cpu=config.cpu_devices is not None)
    with named(launch):
        if config.cpu_devices is not None:
            use_cpu_devices(config.cpu_devices)
        check_jax_settings()
        connect(launch, timeout_s=config.faults.connect_s, heartbeat_s=config.faults.heartbeat_s)
        disable_compilation_cache_on_cpu()
        yield


def by_writer(say: Callable[[str], object]) -> Callable[[str], object]:
    """`say`; in processes other than the writer, which says the same, what says nothing."""
    return say if is_writer() else _say_nothing


def _say_nothing(_: str) -> None:
    """What another process says already."""
