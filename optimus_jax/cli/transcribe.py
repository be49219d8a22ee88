"""`optimus transcribe`: write down recordings with the model of a run, or a published one.

`optimus transcribe --run runs/NAME speech.wav recordings/`
"""

from dataclasses import replace

from optimus_jax.cli.model_flags import MODEL_WORDS, add_model_flags, loaded
from optimus_jax.run.command_line import Parser
from optimus_jax.system.environment import import_jax
from optimus_jax.system.resilient_io import print_to_stderr

WORDS = MODEL_WORDS | {
    "language": "lang",
    "translate": "to_english",
    "batch_size": "batch global_batch",
    "text_field": "text_column transcription_column",
    "audio_field": "audio_column",
}
"""Aliases: what other programs call these flags."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description="Write down recordings: a line for each, with its name and its text. Where"
        " texts are given beside them, the word error rate follows.",
        words=WORDS,
    )
    flags.add_argument(
        "recordings",
        metavar="PATH",
        nargs="+",
        help="recordings, folders with recordings, or Parquet, Arrow and tar files",
    )
    add_model_flags(flags)
    flags.add_argument(
        "--language",
        metavar="CODE",
        help="language of the recordings, such as en, where the tokenizer has languages"
        " (default: the run's, or what a published model's generation_config.json names, or en)",
    )
    flags.add_argument(
        "--translate",
        action="store_true",
        help="write the text in English (default: as the run learnt it, or as spoken)",
    )
    flags.add_argument(
        "--batch-size",
        metavar="N",
        type=int,
        default=8,
        help="recordings, or parts of long ones, at once (default: %(default)s)",
    )
    flags.add_argument(
        "--text-field",
        metavar="NAME",
        help="name of the text in metadata.csv and tables (default: the run's, or text)",
    )
    flags.add_argument(
        "--audio-field",
        metavar="NAME",
        help="column of recordings in tables (default: the run's, or audio)",
    )
    return flags


def main() -> None:
    given = parser().read()
    import_jax()  # after parsing, so that --help does not wait for JAX
    from optimus_jax.config import DataConfig
    from optimus_jax.data.recordings import (
        check_exists,
        check_libraries,
        recordings_in,
        samples_of,
    )
    from optimus_jax.data.word_errors import check_jiwer, has_words, word_errors
    from optimus_jax.inference.sampling import check_range
    from optimus_jax.inference.transcription import batches

    check_range(given["batch_size"] >= 1, "batch_size", given["batch_size"], "choose 1 or more")
    check_libraries(" ".join(given["recordings"]))
    named = {name: given[name] for name in ("text_field", "audio_field") if given[name]}
    for source in given["recordings"]:  # before a model is read, which takes long
        check_exists(source, DataConfig(**named))
    model = loaded(given).speech_model(language=given["language"], translate=given["translate"])
    data, recordings = replace(model.data, **named), []
    for source in given["recordings"]:
        found, notes = recordings_in(source, data, texts="optional")
        recordings += found
        for note in notes:
            print_to_stderr(note)
    if any(each.text and has_words(each.text) for each in recordings):
        check_jiwer()
    texts = []
    for some in batches(recordings, given["batch_size"]):
        samples = [samples_of(each) for each in some]
        found = model.transcribe(samples, batch_size=given["batch_size"])
        for recording, text in zip(some, found, strict=True):
            print(f"{recording.name}\t{text}", flush=True)
            texts.append(text)
    pairs = [(each.text, text) for each, text in zip(recordings, texts, strict=True) if each.text]
    if any(has_words(reference) for reference, _ in pairs):
        references, written = zip(*pairs, strict=True)
        print_to_stderr(
            f"word error rate {word_errors(references, written):.1%} over"
            f" {len(pairs):,} recordings with texts"
        )
