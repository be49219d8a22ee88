"""`optimus summary`: count a model's parameters and FLOPs, and describe a data set.

`optimus summary --model llama3-8b --data 'corpus/*.txt'`
"""

import json

from optimus_jax.config import Config
from optimus_jax.config.presets import MODEL_HELP
from optimus_jax.errors import DataError, explain
from optimus_jax.run.command_line import Parser, settings
from optimus_jax.system.environment import import_jax


def parser() -> Parser:
    """The parser of this command's flags."""
    default = Config()
    flags = Parser(
        description=(
            "Count the parameters, FLOPs and activations of a model's step, by kind of layer, and"
            " describe a data set: its documents, packing and reasonable batch sizes. Needs no"
            " accelerator."
        )
    )
    flags.add_argument("--model", metavar="NAME", required=True, help=MODEL_HELP)
    flags.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="files, globs, folders, URLs or stdlib (default: no data)",
    )
    flags.add_argument(
        "--tokenizer",
        metavar="PATH",
        help=f"{default.data.tokenizer}, or a tokenizer.json (default: as train takes it)",
    )
    flags.add_argument(
        "--seq-len",
        metavar="N",
        help="tokens per example (default: the model's; of text at most 1024)",
    )
    flags.add_argument(
        "--global-batch",
        metavar="N",
        help=f"examples per step (default: {default.data.global_batch})",
    )
    flags.add_argument("--steps", metavar="N", help=f"steps of the run (default: {default.steps})")
    flags.add_argument("--precision", metavar="NAME", help="f32, bf16, f16 (default: f32)")
    flags.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting of a run"
    )
    flags.add_argument("--json", action="store_true", help="print JSON (default: tables)")
    return flags


def main() -> None:
    given = parser().read()
    # After parsing, so that --help does not wait for JAX.
    import_jax()
    from optimus_jax.config.request import make_config
    from optimus_jax.data.mixture import Mixture
    from optimus_jax.data.named_files import FileExamples
    from optimus_jax.planning.profiles.data_profile import profile_data
    from optimus_jax.planning.profiles.model_profile import profile_model
    from optimus_jax.run.inputs import Inputs
    from optimus_jax.run.requested_config import requested_config
    from optimus_jax.weights.published import MODEL
    from optimus_jax.weights.published_adapters import PublishedAdapters, model_with_adapters

    model, asked = given["model"], settings(given)
    config, data = make_config(model_with_adapters(model), asked), []
    if given["data"]:
        if PublishedAdapters.parse(model, what=MODEL) is not None:
            model, asked = None, {"init_from": model} | asked
        inputs = Inputs.of(requested_config(model, None, None, False, asked, False))
        config, train = inputs.config, inputs.data.train
        if isinstance(train, FileExamples):
            raise DataError(
                explain(
                    f"{train.what} are neither packed nor cut: there is nothing to describe",
                    given=f"{train.name}, {len(train.items):,} {train.what}",
                    do="leave --data out; the start of a run shows how many there are",
                )
            )
        data = [
            profile_data(
                source, seq_len=config.seq_len, respect_documents=config.data.respect_documents
            )
            for source in (train.parts if isinstance(train, Mixture) else [train])
        ]
    precision = "f32" if config.precision.compute == "auto" else config.precision.compute
    kernel = "xla" if config.parallel.attention == "auto" else config.parallel.attention
    profile = profile_model(
        config.model, seq_len=config.seq_len, precision=precision, kernel=kernel
    )
    if given["json"]:
        profiles = [json.loads(each.to_json()) for each in data]
        shown = profiles if config.data.mixture else next(iter(profiles), None)
        print(
            json.dumps(
                {"model": json.loads(profile.to_json()), "data": shown},
                indent=2,
            )
        )
        return
    print(profile.describe(), end="")
    for each in data:
        print(f"\n{each.describe()}", end="")
        for warning in each.warnings(global_batch=config.data.global_batch, steps=config.steps):
            print(f"note: {warning}")
