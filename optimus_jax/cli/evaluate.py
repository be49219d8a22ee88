"""`optimus evaluate`: measure a run's model, or a published one, on held-out data.

`optimus evaluate --run runs/NAME --data 'other/*.txt' --mesh fsdp=4`
"""

import dataclasses
import json
from typing import Any

from optimus_jax.cli.model_flags import RUN_WORDS, add_forward_flags, add_named_flags
from optimus_jax.cli.train import end_now, is_one_of_several, told
from optimus_jax.errors import counted
from optimus_jax.faults.stopping import exit_code_of
from optimus_jax.run.command_line import Parser, settings
from optimus_jax.system.environment import import_jax
from optimus_jax.system.resilient_io import print_to_stderr

WORDS = RUN_WORDS | {
    "examples": "limit max_eval_samples eval_examples num_examples",
    "global_batch": "batch_size eval_batch_size",
}
"""Aliases: what other programs call these flags."""
FLAGS = {"--init-from": "--run"}
"""Settings of a run, as error messages name them -> the same as flags of this command."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description="Measure the loss of a model and the metrics of its task: on what its run holds"
        " out, or on other data, on any mesh.",
        words=WORDS,
        settings=FLAGS,
    )
    add_named_flags(flags)
    flags.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="files, globs, folders or URLs, measured whole (default: what the run holds out)",
    )
    flags.add_argument(
        "--examples",
        metavar="N",
        type=int,
        help="most examples, the first ones (default: all)",
    )
    flags.add_argument(
        "--task", metavar="NAME", help="what is measured (default: what the run learns)"
    )
    add_forward_flags(flags, batch="--global-batch")
    flags.add_argument(
        "--json", action="store_true", help="print one line of JSON (default: lines to read)"
    )
    return flags


def main() -> None:
    flags = parser()
    given = flags.read()
    overrides = settings(given, leave=("data",))
    import_jax()  # after parsing, so that --help does not wait for JAX
    from optimus_jax.cluster.distributed import is_writer
    from optimus_jax.run.evaluate import evaluate
    from optimus_jax.run_directory.files import finite

    with flags.own_words():
        try:
            result = evaluate(
                given["run"],
                data=given["data"],
                step=given["step"],
                examples=given["examples"],
                warn=print_to_stderr,
                **overrides,
            )
        except Exception as error:
            if is_one_of_several() and not getattr(error, "raised_by_all_processes", False):
                end_now(f"error: {told(error)}", exit_code_of(error))
            raise
    if is_writer():
        values = finite(dataclasses.asdict(result))
        print(json.dumps(values, allow_nan=False) if given["json"] else _lines(result))


def _lines(result: Any) -> str:
    """An EvaluationResult, to read."""
    rows = [
        ("model", result.weights),
        ("plan", result.plan),
        ("examples", f"{result.num_examples:,}, {counted(result.num_terms, result.term)}"),
        ("loss", f"{result.loss:.4f}"),
        *([] if result.perplexity is None else [("perplexity", f"{result.perplexity:.2f}")]),
        *([] if result.bits_per_byte is None else [("bits/byte", f"{result.bits_per_byte:.4f}")]),
        *((name, f"{value:.4f}") for name, value in result.metrics.items()),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
