"""`optimus summary`: count a model's parameters and FLOPs, and describe a data set.

`optimus summary --model llama3-8b --data 'corpus/*.txt'`
"""

import json

from optimus_jax.config.presets import MODEL_HELP
from optimus_jax.run.command_line import Parser, settings
from optimus_jax.system.environment import import_jax


def parser() -> Parser:
    """The parser of this command's flags."""
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
        "--tokenizer", metavar="PATH", help="bytes, or a tokenizer.json (default: bytes)"
    )
    flags.add_argument(
        "--seq-len",
        metavar="N",
        help="tokens per example (default: the model's; of text at most 1024)",
    )
    flags.add_argument("--global-batch", metavar="N", help="examples per step (default: 16)")
    flags.add_argument("--steps", metavar="N", help="steps of the run (default: 300)")
    flags.add_argument("--precision", metavar="NAME", help="f32, bf16, f16 (default: f32)")
    flags.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting of a run"
    )
    flags.add_argument("--json", action="store_true", help="print JSON")
    return flags


def main() -> None:
    given = parser().read()
    # After parsing, so that --help does not wait for JAX.
    import_jax()
    from optimus_jax.config.request import make_config
    from optimus_jax.data.dataset import load_data
    from optimus_jax.data.mixture import Mixture
    from optimus_jax.planning.profiles.data_profile import profile_data
    from optimus_jax.planning.profiles.model_profile import profile_model
    from optimus_jax.weights.published_adapters import model_with_adapters

    config = make_config(model_with_adapters(given["model"]), settings(given))
    precision = "f32" if config.precision.compute == "auto" else config.precision.compute
    kernel = "xla" if config.parallel.attention == "auto" else config.parallel.attention
    model = profile_model(config.model, seq_len=config.seq_len, precision=precision, kernel=kernel)
    data = []
    if given["data"]:
        train = load_data(
            config.data,
            seq_len=config.seq_len,
            vocab_size=config.model.vocab_size,
            model_name=config.model.name,
        ).train
        data = [
            profile_data(
                source, seq_len=config.seq_len, respect_documents=config.data.respect_documents
            )
            for source in (train.parts if isinstance(train, Mixture) else [train])
        ]
    if given["json"]:
        profiles = [json.loads(profile.to_json()) for profile in data]
        shown = profiles if config.data.mixture else next(iter(profiles), None)
        print(
            json.dumps(
                {"model": json.loads(model.to_json()), "data": shown},
                indent=2,
            )
        )
        return
    print(model.describe(), end="")
    for profile in data:
        print(f"\n{profile.describe()}", end="")
        for warning in profile.warnings(global_batch=config.data.global_batch, steps=config.steps):
            print(f"note: {warning}")
