"""Flags that name a trained model and the devices to use it on, and the model that they name."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optimus_jax.run.command_line import Parser
from optimus_jax.system.resilient_io import print_to_stderr

if TYPE_CHECKING:
    from optimus_jax.inference.loaded_model import LoadedModel

RUN_WORDS = {"run": "run_dir model model_path model_dir checkpoint_path ckpt_dir pretrained"}
MODEL_WORDS = RUN_WORDS | {"eos": "eos_token"}
"""Aliases: what other programs call these flags."""


def add_model_flags(flags: Parser) -> None:
    """Add the flags that `loaded` reads."""
    flags.add_argument(
        "--run",
        metavar="DIR",
        required=True,
        help=(
            "directory or URL of a run; directory of a published model or of PEFT's adapters, or"
            " hf://ORG/NAME on the Hugging Face hub"
        ),
    )
    flags.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="step of the checkpoint to load (default: the newest good one)",
    )
    flags.add_argument(
        "--eos",
        metavar="TOKEN",
        help="token that ends a text of a published model (default: the one that its files name)",
    )
    flags.add_argument(
        "--mesh",
        metavar="SIZES",
        default="",
        help="split the model over fsdp and tensor: tensor=4 (default: one device)",
    )
    flags.add_argument(
        "--cpu-devices",
        metavar="N",
        type=int,
        help="number of virtual CPU devices (default: the devices that JAX finds)",
    )


def add_named_flags(flags: Parser) -> None:
    """Add the flags that name a model for a program that runs it forward on any mesh."""
    flags.add_argument(
        "--run",
        metavar="DIR",
        required=True,
        help="directory or URL of a run; directory of a published model or of PEFT's adapters, or"
        " hf://ORG/NAME",
    )
    flags.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="step of the run's checkpoint (default: the newest good one)",
    )


def add_forward_flags(flags: Parser, *, batch: str) -> None:
    """Add the flags of how such a program runs, and on which devices.

    Args:
      batch: the flag of examples at once.
    """
    flags.add_argument(
        "--tokenizer", metavar="PATH", help="of a published model (default: its own)"
    )
    flags.add_argument(
        "--seq-len", metavar="N", help="tokens of an example (default: the run's, or the model's)"
    )
    flags.add_argument(batch, metavar="N", help="examples at once (default: 8 for each device)")
    flags.add_argument(
        "--mesh", metavar="SIZES", help="`auto` or sizes: fsdp=4,tensor=2 (default: auto)"
    )
    flags.add_argument(
        "--precision",
        metavar="NAME",
        help="f32, bf16, f16 (default: as the run was told; else bf16, on a CPU f32)",
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
        help="any other setting, such as data.text_field=body",
    )


def loaded(given: Mapping[str, Any], *, chat_template: str | None = None) -> "LoadedModel":
    """The model that the flags name, on its devices. Imports JAX, which takes a second."""
    from optimus_jax.inference.loaded_model import load

    return load(
        given["run"],
        step=given["step"],
        mesh=given["mesh"],
        cpu_devices=given["cpu_devices"],
        eos=given["eos"],
        chat_template=chat_template,
        warn=print_to_stderr,
    )
