"""`train`: trains a model from settings to the final state; and `training_loop`, whose loop is the
caller's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import optax

from optimus_jax.config import Config, ModelConfig
from optimus_jax.run.in_python import GivenData
from optimus_jax.run.whole_run import RunResult, run_whole
from optimus_jax.system.paths import UserPath
from optimus_jax.training.callbacks import Callback
from optimus_jax.training.own_loop import TrainingLoop
from optimus_jax.training.task import Task


def train(
    model: UserPath | ModelConfig | None = None,
    *,
    config: Config | UserPath | None = None,
    run_dir: UserPath | None = None,
    resume: bool | Literal["auto"] = False,
    data: GivenData | None = None,
    optimizer: str | optax.GradientTransformation | None = None,
    task: str | Task | None = None,
    eval_data: GivenData | None = None,
    callbacks: Sequence[Callback] = (),
    **overrides: Any,
) -> RunResult:
    """Train a model, or resume a run.

    `train("gpt2-nano")` makes 300 steps of AdamW on the source code of Python's own library, as
    bytes. All defaults are in the reference of settings. What is not given is as in `config`, or as
    in the run that is resumed, if there is one.

    Signal handlers are untouched until the first step; from then on SIGINT and SIGTERM stop the run
    (faults/stopping.py).

    Args:
      model: name of a preset, directory of a published model or ORG/NAME on the hub; or a
        ModelConfig, for a new model of any sizes. Required unless `resume` or `config` is given;
        replaces the model of `config`.
      config: initial settings: a Config, or the path or URL of a config.json.
      run_dir: directory of the run, or the URL of a store; None: a new directory under `runs/`.
      resume: resume the run in `run_dir` from its newest valid checkpoint. `auto`: resume if the
        run exists, start it otherwise, so that a restarted job can use the same command each time.
      data: a path or a list of paths, as `--data` takes them; or a list of records or of token ids,
        or an object with len() and [number] that has these, such as a datasets.Dataset. It is read
        once, and kept as tokens in memory. Or an iterator of these with a state, such as grain's,
        read while the run trains (data/iterated.py), and put back at the end. A resumed run
        needs the object again. None: Python's own library (`stdlib`).
      optimizer: `adamw`, `sgd` or another row of OPTIMIZERS (training/optimizer.py); or a
        transformation of optax with its learning rate, such as `optax.lion(1e-4)`. It must do the
        same to an element whatever the others are. A resumed run needs it again. None: AdamW, with
        a learning rate by the size of the model.
      task: name of what is learnt, such as classification; or a Task (training/task.py), with a
        loss of its own. A resumed run needs the object again. None: by the model, next_token for
        decoders (`Config.task`).
      eval_data: held-out data, as `data`, but no iterator; None: a share of `data`, which
        `data.eval_fraction` says (1%). A resumed run needs the object again.
      callbacks: are told what the run does (training/callbacks.py).
      overrides: settings by short name (`mesh="data=2,fsdp=4"`, also as a dict or AxisSizes,
        `lr=1e-3`) or, in a dict, by dotted name (`**{"optimizer.beta2": 0.99}`), which accepts text
        as `--set` does. Equivalent names
        of other frameworks (`learning_rate`, `max_steps`, `output_dir`) are accepted with a note
        (config/aliases.py).
    Returns:
      The result of the run, also of one that was stopped: `reason` says why it has ended.
    Raises:
      OptimusError: a mistake that the user can fix; the message says how. Its subclasses
        (errors.py) name the kind: ConfigError, PlanError, DataError, CheckpointError,
        RunDirectoryError, StoreError; LearningError if training has diverged.
      FaultError: another process or the network failed; the run is worth resuming.
      SystemExit: a callback has called `sys.exit`; the run has ended in order.
    """
    run = run_whole(
        model,
        config=config,
        run_dir=run_dir,
        resume=resume,
        data=data,
        optimizer=optimizer,
        task=task,
        eval_data=eval_data,
        callbacks=callbacks,
        overrides=overrides,
    )
    try:
        next(run)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("nobody asked for a loop")


@contextmanager
def training_loop(
    model: UserPath | ModelConfig | None = None,
    *,
    config: Config | UserPath | None = None,
    run_dir: UserPath | None = None,
    resume: bool | Literal["auto"] = False,
    data: GivenData | None = None,
    optimizer: str | optax.GradientTransformation | None = None,
    task: str | Task | None = None,
    eval_data: GivenData | None = None,
    callbacks: Sequence[Callback] = (),
    **overrides: Any,
) -> Iterator[TrainingLoop]:
    """`train` with a loop of the caller's own, in the block of a `with` statement::

        with optimus_jax.training_loop("gpt2-nano", mesh="fsdp=8", steps=100) as loop:
            for batch in loop:
                metrics = loop.step(batch)

    At the end of the block, also if it is left early, the state is saved, and the run can be
    resumed, by `train` too. It evaluates and saves in between only when it is told to. After an
    Exception the state is saved if that is possible.

    Args: those of `train`.
    Raises:
      ConfigError: a setting asks for what only `train` does: a controller, phases, snapshots.
      OptimusError, FaultError: as `train`.
    """
    run = run_whole(
        model,
        config=config,
        run_dir=run_dir,
        resume=resume,
        data=data,
        optimizer=optimizer,
        task=task,
        eval_data=eval_data,
        callbacks=callbacks,
        overrides=overrides,
        has_own_loop=True,
    )
    loop = next(run)
    try:
        yield loop
    except BaseException as error:
        with suppress(StopIteration):  # of a run that has ended in order, after sys.exit
            run.throw(error)
        raise
    next(run, None)
