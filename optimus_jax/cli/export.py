"""`optimus export`: write a run's model as a directory that transformers loads.

`optimus export --run runs/NAME --to exported/NAME`
"""

from collections.abc import Mapping
from typing import Any

from optimus_jax.config import ExportConfig
from optimus_jax.errors import ConfigError, explain
from optimus_jax.run.command_line import Parser
from optimus_jax.system.environment import import_jax
from optimus_jax.system.resilient_io import print_to_stderr

WORDS = {
    "run": "run_dir model_path model_dir checkpoint_path ckpt_dir checkpoint_dir input_dir",
    "to": "out output output_dir output_path save_dir save_path dump_path hf_dir",
    "dtype": "torch_dtype save_dtype precision target_dtype",
    "max_shard_size": "shard_size",
}
"""Aliases: what other programs call these flags."""
FLAGS = {"export.dtype": "--dtype", "export.max_shard_size=": "--max-shard-size "}
"""Settings of a run, as error messages name them -> the same as flags of this command."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description=(
            "Export a run's model: config, weights, tokenizer and model card, which Hugging Face's"
            " transformers loads. Needs no accelerator, and little memory."
        ),
        words=WORDS,
        settings=FLAGS,
    )
    flags.add_argument("--run", metavar="DIR", required=True, help="directory or URL of a run")
    flags.add_argument("--to", metavar="DIR", required=True, help="directory to make")
    flags.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="step of the checkpoint to export (default: the newest good one)",
    )
    flags.add_argument(
        "--generator",
        action="store_true",
        help="write the model's generator (default: the model that it was trained beside)",
    )
    flags.add_argument(
        "--adapters",
        action="store_true",
        help="write the run's adapters alone, in PEFT's format (default: merge them)",
    )
    flags.add_argument(
        "--base",
        metavar="NAME",
        help=(
            "with --adapters: the model that they are for, DIR or ORG/NAME (default: where the"
            " run's parameters came from)"
        ),
    )
    flags.add_argument(
        "--dtype", metavar="NAME", help="f32, bf16 or f16 (default: as in the checkpoint)"
    )
    flags.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help=f"largest file of weights, such as 500MB (default: {ExportConfig().max_shard_size})",
    )
    return flags


def check_kind(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for flags of whole models with adapters alone, or the other way round."""
    if given["adapters"]:
        unused = "dtype", "max_shard_size", "generator"
        what = "adapters alone are float32, in one file, and of no generator"
    else:
        unused, what = ("base",), "only adapters alone name another model"
    named = [f"--{name.replace('_', '-')}" for name in unused if given[name] not in (None, False)]
    if named:
        flags = " and ".join(named)
        kind = "with --adapters" if given["adapters"] else "without --adapters"
        raise ConfigError(explain(what, given=f"{flags} {kind}", do=f"leave {flags} out"))


def main() -> None:
    flags = parser()
    given = flags.read()
    check_kind(given)
    import_jax(only_cpu=True)  # after parsing, so that --help does not wait for JAX
    from optimus_jax.run.adapters import save_adapters
    from optimus_jax.run.export import export

    if given["adapters"]:
        with flags.own_words():
            step = save_adapters(
                given["run"],
                given["to"],
                step=given["step"],
                base=given["base"],
                warn=print_to_stderr,
            )
        print(f"{given['to']}: adapters after step {step}")
        return
    with flags.own_words():
        done = export(
            given["run"],
            given["to"],
            step=given["step"],
            dtype=given["dtype"],
            max_shard_size=given["max_shard_size"],
            generator=given["generator"],
            warn=print_to_stderr,
        )
    print(
        f"{done.directory}: {done.num_params:,} parameters in {done.dtype} after step {done.step},"
        f" {done.num_bytes:,} bytes"
    )
