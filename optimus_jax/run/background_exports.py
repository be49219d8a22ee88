"""Exports of a run while it trains: process 0 writes them in a thread, from checkpoints.

Nothing here can end a run or cost it a checkpoint: a failure is logged as a fault, room for the
next checkpoint is left on the disk, and a checkpoint that is being exported is kept.
"""

import threading
import time
from dataclasses import replace
from pathlib import Path

from optimus_jax.config import Config
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.faults.fault_log import write_fault
from optimus_jax.faults.progress import Progress
from optimus_jax.models.huggingface_config import config_to_huggingface
from optimus_jax.run.export import RunToExport
from optimus_jax.run.exported_weights import StoppedError
from optimus_jax.run_directory.contents import EXPORTS
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.system.paths import local_path
from optimus_jax.training.watchers import Display

PATIENCE_S = 600.0
"""How long the end of a run waits for an export."""
_POLL_S = 1.0
DIRECTORY = "export.dir"
"""Setting that names the directory of a run's exports."""


class BackgroundExports:
    """The exports of a run. Every process has one, and process 0 writes.

    Args:
      config: of the run.
      run: its directory.
      tokenizer: its tokenizer.
    Raises:
      ConfigError: exports are wanted, and transformers has no such model.
    """

    def __init__(
        self, config: Config, run: RunDirectory, tokenizer: Tokenizer, display: Display
    ) -> None:
        self._config, self._run, self._tokenizer = config, run, tokenizer
        self._display = display
        self._thread: threading.Thread | None = None
        self._is_stopping = threading.Event()
        self._last = 0
        self._due: tuple[int, ...] = ()
        if self.every:
            config_to_huggingface(replace(config.model, generator=None))

    @property
    def every(self) -> int:
        """Steps between exports; 0: none."""
        return self._config.export.every

    @property
    def limits(self) -> tuple[int, ...]:
        """Steps whose checkpoints are kept because they may be being exported; the same on all
        processes.
        """
        return self._due

    def begin(self, first_step: int) -> None:
        """The run begins after a step."""
        self._last = first_step

    def saved(self, step: int) -> None:
        """The checkpoint of a step is complete. Every process calls this."""
        if not self.every or step // self.every <= self._last // self.every:
            return
        self._last = step
        self._due = (*self._due[-1:], step)
        if not self._run.writer:
            return
        if self._thread is not None and self._thread.is_alive():
            self._failed(step, "the one before it is still being written")
            return
        self._thread = threading.Thread(
            target=self._write, args=(step,), name="export", daemon=True
        )
        self._thread.start()

    def finish(self, progress: Progress, *, is_wanted: bool) -> None:
        """Wait for an export under way, at most PATIENCE_S, or give it up.

        Args:
          progress: records that this process is alive.
          is_wanted: whether there is time to wait.
        """
        until_s = time.monotonic() + (PATIENCE_S if is_wanted else 0)
        while self._thread is not None and self._thread.is_alive():
            if time.monotonic() > until_s:
                self._is_stopping.set()
                until_s = float("inf")
            with progress.during("write"):
                self._thread.join(_POLL_S)

    def _write(self, step: int) -> None:
        """Export a checkpoint; raises nothing."""
        try:
            exported = RunToExport(
                run=RunDirectory(self._run.path, writer=False, warn=self._display.process_message),
                config=self._config,
                tokenizer=self._tokenizer,
                is_stopping=self._is_stopping.is_set,
                named_by=DIRECTORY,
                leaves_room_for_checkpoint=True,
            )
            done = exported.write(
                step,
                self._directory() / f"step-{step}",
                self._config.export,
                show_progress=False,
            )
            self._display.process_message(f"step {step}: exported to {done.directory}")
        except StoppedError:
            self._failed(step, "the run ended")
        except Exception as error:
            self._failed(step, str(error) or type(error).__name__)

    def _directory(self) -> Path:
        given = self._config.export.dir
        if given is None:
            return self._run.path / EXPORTS
        return local_path(given, what=DIRECTORY).absolute()

    def _failed(self, step: int, why: str) -> None:
        """Say and log that there is no export of a step."""
        what = f"the checkpoint of step {step} was not exported: {why}"
        try:
            write_fault(self._run.path, 0, step, what=what.partition("\n")[0])
        except OSError:
            what += "\n  (this could not be logged either)"
        self._display.process_message(what)
