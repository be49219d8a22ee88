"""`optimus train`: train a model.

`optimus train --model gpt2-nano --cpu-devices 8 --mesh data=2,fsdp=4`
"""

import os
import sys
import traceback
from argparse import SUPPRESS
from collections.abc import Callable
from typing import Literal, NoReturn

from optimus_jax.config import Config
from optimus_jax.config.presets import MODEL_HELP
from optimus_jax.config.request import say
from optimus_jax.config.run_checkpoint import INIT_FROM
from optimus_jax.errors import FaultError, OptimusError
from optimus_jax.faults.stopping import (
    EXIT_BROKEN,
    EXIT_INTERRUPT,
    EXIT_NO_READER,
    EXIT_RESTART,
    NOT_BEGUN,
    ImmediateStop,
    Terminated,
    exit_code_of,
    exit_with_code_on_signal,
    raise_on_signal,
)
from optimus_jax.run.command_line import Parser, settings
from optimus_jax.system.environment import import_jax, replace_unencodable_characters
from optimus_jax.system.huge_pages import restart_with_huge_pages
from optimus_jax.system.resilient_io import (
    flush_with_timeout,
    ignoring_write_errors,
    open_closed_streams,
    raising_output_errors,
)

RESUME: dict[str | None, bool | Literal["auto"]] = {None: False, "always": True, "auto": "auto"}
"""Value of --resume -> argument `resume` of `train`."""


def parser(note: Callable[[str], None] = say) -> Parser:
    """The parser of this command's flags. The parsed result holds only the flags that were given.

    Args:
      note: called with a message for each alias that is used.
    """
    default = Config()
    flags = Parser(
        note=note,
        usage=(
            "%(prog)s --model NAME | --config FILE | --init-from DIR [flags]   or"
            "   --run-dir DIR --resume [flags]"
        ),
        description="Train a model on any data x fsdp x tensor x pipe mesh.",
        argument_default=SUPPRESS,
    )
    flags.add_argument("--model", metavar="NAME", help=MODEL_HELP)
    flags.add_argument(
        "--config",
        metavar="FILE",
        help="start from this config.json of a run, or its URL; flags change it (default: none)",
    )
    flags.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="files, globs, folders, URLs or `stdlib`, or NAME=WEIGHT:PATH each (default: stdlib)",
    )
    flags.add_argument(
        "--eval-data",
        nargs="*",
        metavar="PATH",
        help="held-out data of the same kind (default: a share of --data, data.eval_fraction)",
    )
    flags.add_argument(
        "--tokenizer",
        metavar="PATH",
        help=(
            "`bytes`, a tokenizer.json or its folder, hf://ORG/NAME (default: the model's, or"
            f" {default.data.tokenizer})"
        ),
    )
    flags.add_argument(
        "--task",
        metavar="NAME",
        help="what is learnt, `list` names all (default: by the model: next_token, mlm, ...)",
    )
    flags.add_argument(
        "--recipe",
        metavar="NAME",
        help="published settings to start from, `list` names all (default: none)",
    )
    flags.add_argument(
        "--seq-len",
        metavar="N",
        help="tokens per example (default: the model's; of text at most 1024)",
    )
    flags.add_argument(
        "--global-batch",
        metavar="N",
        help=f"examples per step over all devices (default: {default.data.global_batch})",
    )
    flags.add_argument(
        "--phases",
        metavar="LIST",
        help="later batches, STEP:BATCH or STEP:BATCHxTOKENS: 200:64,400:128x2048 (default: none)",
    )
    flags.add_argument(
        "--steps", metavar="N", help=f"steps of the whole run (default: {default.steps})"
    )
    flags.add_argument(
        "--lr", metavar="X", help="peak learning rate (default: depends on the model size)"
    )
    flags.add_argument(
        "--mesh",
        metavar="SIZES",
        help=(
            "`auto` or sizes of data, fsdp, tensor and pipe: data=2,pipe=4 (default:"
            f" {default.parallel.mesh})"
        ),
    )
    flags.add_argument(
        "--zero",
        metavar="N",
        help="0-3: ZeRO stage over fsdp (default: planned; with a given mesh 3 if fsdp > 1)",
    )
    flags.add_argument(
        "--microbatches",
        metavar="N",
        help="parts of a step's batch (default: planned; with a given mesh 1, or 4 per stage)",
    )
    flags.add_argument(
        "--schedule",
        metavar="NAME",
        help="gpipe, 1f1b, interleaved or FILE.json (default: planned; with a given mesh 1f1b)",
    )
    flags.add_argument(
        "--remat",
        metavar="NAME",
        help=f"none, selective, dots, full (default: {default.parallel.remat})",
    )
    flags.add_argument(
        "--precision",
        metavar="NAME",
        help="f32, bf16, f16 (default: bf16, f16 on GPUs without it, f32 on a CPU)",
    )
    flags.add_argument(
        "--control", metavar="NAME", help=f"off, advise, auto (default: {default.control})"
    )
    flags.add_argument(
        "--seed", metavar="N", help=f"weights, data order, dropout (default: {default.seed})"
    )
    flags.add_argument(
        INIT_FROM,
        metavar="DIR",
        help=(
            "begin with a run, DIR or DIR@STEP, a published model or PEFT's adapters (default:"
            " --model)"
        ),
    )
    flags.add_argument(
        "--eval-every",
        metavar="N",
        help=f"steps between held-out losses (default: {default.eval_every})",
    )
    flags.add_argument(
        "--checkpoint-every",
        metavar="N",
        help=f"steps between saves (default: {default.checkpoint.every})",
    )
    flags.add_argument(
        "--run-dir",
        metavar="DIR",
        help=(
            "where to keep the run: a directory, s3://, gs:// or az:// (default: a new one in"
            " runs/)"
        ),
    )
    flags.add_argument(
        "--resume",
        nargs="?",
        const="always",
        choices=["always", "auto"],
        metavar="auto",
        help="resume the run in --run-dir; auto: start it if there is none",
    )
    flags.add_argument(
        "--progress",
        metavar="NAME",
        help=f"auto, rich, plain, none (default: {default.log.progress})",
    )
    flags.add_argument(
        "--verbose",
        action="store_true",
        help="show all that was chosen (default: what matters most)",
    )
    flags.add_argument(
        "--log",
        metavar="LIST",
        help="trackers: tensorboard, wandb, mlflow; several with commas (default: none)",
    )
    flags.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="steps to trace, and to say where their time goes: 10:15 (default: none)",
    )
    flags.add_argument(
        "--cpu-devices",
        metavar="N",
        help="number of virtual CPU devices (default: the devices that JAX finds)",
    )
    flags.add_argument(
        "--coordinator", metavar="HOST:PORT", help="several processes: address of process 0"
    )
    flags.add_argument("--num-processes", metavar="N", help="several processes: their number")
    flags.add_argument("--process-id", metavar="I", help="several processes: index of this one")
    flags.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="any other setting, such as optimizer.beta2=0.99; --settings [SECTION] shows them",
    )
    return flags


def main() -> int:
    """Train, and return the exit code.

    - 0: done, or stopped by Ctrl-C and saved.
    - 1: an unexpected error.
    - 2: a user error.
    - 75: stopped by SIGTERM or a similar signal, or ended by a fault; worth restarting.
    - 76: the run no longer learns (NaN). Restarting it unchanged would end the same way.
    - 130: ended by Ctrl-C before the first step, or by a second Ctrl-C without saving.
    """
    open_closed_streams()
    replace_unencodable_characters()
    stdout = sys.stdout
    sys.stdout, sys.stderr = raising_output_errors(stdout), ignoring_write_errors(sys.stderr)
    notes: list[str] = []

    def show_notes() -> None:
        while notes:
            say(notes.pop(0))

    try:
        # Only --help prints here. Its text is the result of the command, so a failed write is an
        # error; a failed write of a run's lines is not.
        try:
            given = parser(notes.append).read()
        finally:
            sys.stdout.flush()
            sys.stdout = ignoring_write_errors(stdout)
    except OptimusError as error:
        show_notes()
        flush_with_timeout(f"error: {told(error)}\n", after=(sys.stdout, sys.stderr))
        return end_in_order(exit_code_of(error))
    except BrokenPipeError:
        return EXIT_NO_READER
    try:
        overrides = settings(given, note=notes.append)
        if "cpu_devices" in given:
            restart_with_huge_pages()
        # After parsing, so that --help does not wait for JAX, and after a restart, which would
        # import it twice.
        import_jax()
        from optimus_jax.run.api import train

        show_notes()  # after a possible restart, which would show them again
        raise_on_signal()
        return end_in_order(
            train(
                given.get("model"),
                config=given.get("config"),
                run_dir=given.get("run_dir"),
                resume=RESUME[given.get("resume")],
                **overrides,
            ).exit_code
        )
    except OptimusError as error:
        show_notes()
        if is_one_of_several() and not error.raised_by_all_processes:
            return end_now(f"error: {told(error)}", exit_code_of(error))
        flush_with_timeout(f"error: {told(error)}\n", after=(sys.stdout, sys.stderr))
        return end_in_order(exit_code_of(error))
    except FaultError as error:
        return end_now(f"fault: {told(error)}", EXIT_RESTART)
    except Exception as error:
        if not is_one_of_several():
            end_in_order(EXIT_BROKEN)
            raise
        return end_now("".join(traceback.format_exception(error)), EXIT_BROKEN)
    except ImmediateStop:
        return end_now("stopped without saving; earlier checkpoints are complete", EXIT_INTERRUPT)
    except KeyboardInterrupt:
        return end_now(NOT_BEGUN, EXIT_INTERRUPT)
    except Terminated:
        return end_now(NOT_BEGUN, EXIT_RESTART)


def is_one_of_several() -> bool:
    """Whether JAX connects this process to others, so that a normal exit would wait for them."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def told(error: Exception) -> str:
    """The message of an error, followed by the notes that were added to it."""
    return "\n  ".join([str(error), *getattr(error, "__notes__", ())])


def end_in_order(code: int) -> int:
    """Prepare a normal exit of Python with this exit code, and return the code.

    The exit may wait for unfinished saves. From now on Ctrl-C ends the process as it ends any
    program, and SIGTERM ends it with this code. If another process of the run does not reach its
    end, this process exits at once instead of waiting for it.
    """
    exit_with_code_on_signal(code)
    flush_with_timeout("", after=(sys.stdout, sys.stderr))
    if is_one_of_several():
        from optimus_jax.cluster.distributed import disconnect

        if not disconnect():
            return end_now(
                "this process is done, and exits without waiting for another one that is not",
                code,
            )
    return code


def end_now(text: str, code: int) -> NoReturn:
    """Print the reason and exit at once.

    A normal exit of Python would wait for unfinished saves, connections and compilations.
    """
    flush_with_timeout(f"\n{text}\n", after=(sys.stdout, sys.stderr))
    os._exit(code)
