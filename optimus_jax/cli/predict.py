"""`optimus predict`: the labels that a run's model, or a published one, gives to records.

`optimus predict --run runs/NAME --data new.jsonl --output labels.jsonl`
"""

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from optimus_jax.cli.model_flags import RUN_WORDS, add_forward_flags, add_named_flags
from optimus_jax.cli.train import end_now, is_one_of_several, told
from optimus_jax.errors import ConfigError, explain
from optimus_jax.faults.stopping import exit_code_of
from optimus_jax.run.command_line import Parser, settings
from optimus_jax.system.environment import import_jax
from optimus_jax.system.paths import local_path
from optimus_jax.system.resilient_io import print_to_stderr

WORDS = RUN_WORDS | {
    "data": "input input_file test_file predict_file",
    "output": "out output_file predictions_file",
    "batch_size": "batch global_batch eval_batch_size per_device_eval_batch_size",
    "top": "top_k topk",
    "max_answer_tokens": "max_answer_length max_answer_len",
}
"""Aliases: what other programs call these flags."""
FLAGS = {"--init-from": "--run", "max_answer_tokens": "--max-answer-tokens"}
"""Settings of a run, as error messages name them -> the same as flags of this command."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description="Predict the labels of texts, words or images, or the answers to questions: a"
        " JSON object for each record, which needs no label.",
        words=WORDS,
        settings=FLAGS,
    )
    add_named_flags(flags)
    flags.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        required=True,
        help="files, globs, folders or URLs; of images files, folders, tables or tar files",
    )
    flags.add_argument(
        "--output",
        metavar="FILE",
        help="new file to write, as JSON Lines (default: standard output)",
    )
    flags.add_argument(
        "--top",
        metavar="N",
        type=int,
        help="labels of a text or an image that `scores` ranks (default: 5)",
    )
    flags.add_argument(
        "--max-answer-tokens",
        metavar="N",
        type=int,
        help="most tokens of an answer to a question (default: 30)",
    )
    add_forward_flags(flags, batch="--batch-size")
    return flags


def main() -> None:
    flags = parser()
    given = flags.read()
    overrides = settings(given, leave=("data",))
    if given["batch_size"] is not None:
        overrides["data.global_batch"] = given["batch_size"]
    out = None if given["output"] is None else local_path(given["output"], what="--output")
    import_jax()  # after parsing, so that --help does not wait for JAX
    from optimus_jax.cluster.distributed import is_writer
    from optimus_jax.run.predict import predict

    def check_output() -> None:
        if out is not None and is_writer():
            _check_new(out)

    with flags.own_words():
        try:
            answers = predict(
                given["run"],
                tuple(given["data"]),
                step=given["step"],
                top=given["top"],
                max_answer_tokens=given["max_answer_tokens"],
                warn=print_to_stderr,
                when_connected=check_output,
                **overrides,
            )
            first = next(answers)  # raises most errors before a file is made
            writes = is_writer()
            with _written(out if writes else None) as write:
                for answer in itertools.chain([first], answers):
                    if writes:
                        write(json.dumps(answer, ensure_ascii=False))
        except Exception as error:
            if is_one_of_several() and not getattr(error, "raised_by_all_processes", False):
                end_now(f"error: {told(error)}", exit_code_of(error))
            raise


def _check_new(out: Path) -> None:
    """Raise ConfigError if the file that --output names exists, or its folder does not."""
    if out.exists() or not out.parent.is_dir():
        why = "exists" if out.exists() else "is in no folder"
        raise ConfigError(
            explain(
                "answers are written into a new file",
                given=f"--output {out}, which {why}",
                do="use another name, or remove it" if out.exists() else "make the folder first",
            )
        )


@contextlib.contextmanager
def _written(out: Path | None) -> Iterator[Callable[[str], object]]:
    """What writes a line: to standard output, or to a file that gets its name when it is complete.
    A file that is not stays under another name, which is told.

    Raises ConfigError if it cannot be written.
    """
    if out is None:
        yield lambda line: print(line, flush=True)
        return
    with _output_errors():
        _check_new(out)
        part = out.with_name(f"{out.name}.{secrets.token_hex(4)}.part")
        file = part.open("x", encoding="utf-8")

    def write(line: str) -> None:
        with _output_errors():
            print(line, file=file)

    try:
        yield write
        with _output_errors():
            file.close()
            _rename_to_new(part, out)
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        print_to_stderr(f"the answers so far are in {part}")
        raise


def _rename_to_new(part: Path, out: Path) -> None:
    """Give a file its name. Raises OSError if there is such a file by now."""
    try:
        os.link(part, out)  # a rename would replace the other file
    except FileExistsError:
        raise
    except OSError:  # the file system has no links
        _check_new(out)
        part.rename(out)
    else:
        part.unlink()


@contextlib.contextmanager
def _output_errors() -> Iterator[None]:
    """Context in which an OSError becomes a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            explain("answers cannot be written", given=error, do="name another --output")
        ) from error
