"""Exports a run's model: a directory that transformers loads without a flag.

The parameters of a checkpoint are passed on slice by slice (run/exported_weights.py) into a
directory that has its name only when it is complete (system/new_directory.py).
"""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.checkpoint.errors import DamagedError, UnreachableError
from optimus_jax.checkpoint.slices import StoredCheckpoint
from optimus_jax.config import Config, ExportConfig, ModelConfig
from optimus_jax.data.published_tokenizer import adds_tokens, published_files
from optimus_jax.data.recordings import start_of
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.errors import CheckpointError, ConfigError, explain
from optimus_jax.models.families import generator_of
from optimus_jax.models.generator import beside_generator, of_generator
from optimus_jax.models.huggingface import config_from_huggingface
from optimus_jax.models.huggingface_config import config_to_huggingface
from optimus_jax.run.byte_progress import byte_progress
from optimus_jax.run.exported_weights import DTYPES, WeightsExport, dtype_of
from optimus_jax.run.model_card import (
    CARD,
    GENERATION,
    generation_config,
    model_card,
    preprocessor_config,
    purpose_of,
)
from optimus_jax.run.named_run import RUN
from optimus_jax.run.stored_config import check_stored_config
from optimus_jax.run.stored_run import config_of_run, run_to_read
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.run_data import check_tokenizer, tokenizer_of_run
from optimus_jax.system.new_directory import check_free, new_directory
from optimus_jax.system.paths import UserPath, local_path
from optimus_jax.training.tasks import MLM
from optimus_jax.weights.directory import CONFIG
from optimus_jax.weights.image_processor import PREPROCESSOR
from optimus_jax.weights.published import GENERATION_CONFIG

GENERATOR_FLAG = "--generator"
"""Flag of an export of a generator."""
TO = "--to"
"""Flag that names the directory of an export."""
OTHER_FILES_BYTES = 64 << 20
"""Room for the tokenizer and small files."""


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """A directory that transformers loads."""

    directory: Path
    """Where it is, as it was named."""
    step: int
    """Step of the checkpoint whose parameters it has."""
    dtype: str
    """Number format of the weights: f32, bf16 or f16."""
    num_params: int
    """Parameters that were written."""
    num_bytes: int
    """Bytes of the tensors."""


@dataclass(frozen=True, kw_only=True)
class RunToExport:
    """A run, of which a checkpoint can be exported. Only read; needs no other process."""

    run: RunDirectory
    config: Config
    tokenizer: Tokenizer
    is_stopping: Callable[[], bool] = lambda: False
    """Whether to give up an export that has begun: `StoppedError` is raised."""
    named_by: str = TO
    """What names the directory of an export, for errors."""
    leaves_room_for_checkpoint: bool = False
    """Whether the disk must have room for another checkpoint besides."""
    generator: bool = False
    """Whether to export the model's generator and not the model."""

    @classmethod
    def at(cls, path: Path, given: object, *, generator: bool = False) -> "RunToExport":
        """The run in a directory.

        Args:
          given: how the user named it.
          generator: as above.
        Raises:
          OptimusError: there is no run, or its tokenizer cannot be used.
        """
        run = RunDirectory(path, writer=False)
        config = config_of_run(run, given, purpose="to export")
        if generator and config.model.generator is None:
            raise ConfigError(
                explain(
                    "the run's model has no generator",
                    given=f"{GENERATOR_FLAG}, {config.model.name}",
                    do=f"leave {GENERATOR_FLAG} out",
                )
            )
        tokenizer = tokenizer_of_run(run, config.data)
        return cls(run=run, config=config, tokenizer=tokenizer, generator=generator)

    @property
    def model(self) -> ModelConfig:
        """The model to export."""
        model = self.config.model
        generator = generator_of(model) if self.generator else None
        return replace(model, generator=None) if generator is None else generator

    def write(
        self, step: int, to: Path, settings: ExportConfig, *, show_progress: bool
    ) -> ExportResult:
        """Export one checkpoint.

        Raises:
          DamagedError, UnreachableError: the checkpoint cannot be read, or is not what was saved.
          OptimusError: it is of another model, transformers has no such model, or the directory
            exists or cannot be written.
        """
        checkpoint = StoredCheckpoint.at(self.run.checkpoints / str(step))
        check_stored_config(checkpoint.metadata, self.config, sections=("model.",))
        check_tokenizer(self.tokenizer, self.run, checkpoint.metadata)
        dtype = settings.dtype or dtype_of(checkpoint)
        config = self.model
        theirs = config_to_huggingface(
            config,
            dtype=DTYPES[dtype].name,
            eos=self.tokenizer.eos,
            start=start_of(self.tokenizer),
        )
        weights = WeightsExport.of(
            checkpoint,
            config_from_huggingface(theirs),
            config.tuning,
            dtype,
            of_generator if self.generator else beside_generator,
        )
        with new_directory(to, what=self.named_by) as directory:
            needed = weights.num_bytes + OTHER_FILES_BYTES
            if self.leaves_room_for_checkpoint:
                needed += checkpoint.num_bytes
            _check_room(directory, needed)
            files = {}
            if config.reads != "text":
                files[PREPROCESSOR] = preprocessor_config(config).encode()
            if config.reads != "images":
                longest = config.max_length - config.frames
                files |= published_files(
                    self.tokenizer, self.run.path, longest, of_sound=bool(config.frames)
                )
            files |= {
                CONFIG: _json(theirs),
                CARD: model_card(
                    self.run,
                    replace(
                        self.config, model=config, task=MLM if self.generator else self.config.task
                    ),
                    self.tokenizer,
                    step=step,
                    metadata=checkpoint.metadata,
                    num_params=weights.num_params,
                    dtype=dtype,
                    adds_tokens=adds_tokens(self.tokenizer),
                ).encode(),
            }
            if purpose_of(config) == GENERATION or config.frames:
                written = generation_config(config, self.tokenizer, self.config.data)
                files[GENERATION_CONFIG] = written.encode()
            try:
                for name, content in files.items():
                    (directory / name).write_bytes(content)
                with byte_progress(show=show_progress) as bar:
                    task = bar.add_task("parameters", total=weights.num_stored_bytes)
                    weights.write(
                        directory,
                        settings.max_shard_bytes,
                        advance=lambda num_bytes: bar.advance(task, num_bytes),
                        is_stopping=self.is_stopping,
                    )
            except OSError as error:
                raise not_written(to, error) from error
        return ExportResult(
            directory=to,
            step=step,
            dtype=dtype,
            num_params=weights.num_params,
            num_bytes=weights.num_bytes,
        )


def export(
    run_dir: UserPath,
    to: UserPath,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_size: str | None = None,
    generator: bool = False,
    warn: Callable[[str], object] = warnings.warn,
) -> ExportResult:
    """Export a run's model: config, weights, tokenizer and model card, for transformers.

    The weights are passed on slice by slice; memory does not depend on their size. Nothing is
    overwritten, and the directory appears when it is complete.

    Args:
      run_dir: directory of a run, or its URL in a store, which is copied first.
      to: the directory to make.
      step: of a checkpoint; None: the newest good one.
      dtype: `f32`, `bf16` or `f16`; None: as in the checkpoint.
      max_shard_size: largest file of weights, such as `5GB`, which is the default.
      generator: whether to export the model's generator and not the model.
      warn: called with messages about what was skipped.
    Raises:
      OptimusError: there is no such run or checkpoint, transformers has no such model, or the
        directory exists or cannot be written.
    """
    given = {"export.dtype": dtype, "export.max_shard_size": max_shard_size}
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = Config().with_values(chosen).export
    target = local_path(to, what=TO, do="write a directory here, and copy it").absolute()
    check_free(target, what=TO)
    exported = RunToExport.at(
        run_to_read(run_dir, what=RUN, checkpoint=step, say=warn),
        given=run_dir,
        generator=generator,
    )
    checkpoints = Checkpoints(exported.run.checkpoints, exported.config.checkpoint, warn=warn)
    damage = {}
    steps = checkpoints.steps()
    for candidate in reversed([each for each in steps if step in (None, each)]):
        try:
            return exported.write(candidate, target, settings, show_progress=True)
        except (DamagedError, UnreachableError) as error:
            damage[candidate] = error
            if step is None:
                warn(f"the checkpoint of step {candidate} cannot be used and is skipped: {error}")
    raise CheckpointError(
        explain(
            "there is no good checkpoint" + ("" if step is None else f" of step {step}"),
            given=f"{exported.run.checkpoints}, steps {', '.join(map(str, steps)) or 'none'}"
            + "".join(f"\n    {at}: {why}" for at, why in damage.items()),
            do="choose another step, or train until there is a checkpoint",
        )
    )


def _check_room(directory: Path, num_bytes: int) -> None:
    """Raise CheckpointError if a directory's file system has not so many free bytes."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise CheckpointError(
            explain(
                "there is no room for the exported model",
                given=f"{num_bytes:,} bytes to write, {free:,} free, in {directory.parent}",
                do="make room, choose another directory, or --dtype bf16",
            )
        )


def not_written(to: Path, error: OSError) -> CheckpointError:
    """The error of a directory whose files cannot be written."""
    return CheckpointError(
        explain(
            f"the exported model cannot be written: {error.strerror or error}",
            given=to,
            do="make room, or choose another directory",
        )
    )


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
