"""`optimus tokenize`: tokenize text files into one .bin file.

`optimus tokenize corpus/*.txt --tokenizer tokenizer.json --out corpus.bin`
"""

import sys

from optimus_jax.config.data import BYTES
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.data.sources import read_documents
from optimus_jax.data.tokenizers import encode_documents, load_tokenizer
from optimus_jax.data.tokens import write_token_file
from optimus_jax.run.command_line import Parser
from optimus_jax.system.paths import local_path

FLAGS = {
    "--set data.text_field=": "--text-field ",
    "--set data.skip_bad_lines=true": "--skip-bad-lines",
    "--set data.eos=": "--eos ",
}
"""Settings of a run, as error messages name them -> the same as flags of this command."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description=(
            "Tokenize text files into one .bin file. Training reads such a file without tokenizing"
            " it again."
        ),
        words={
            "sources": "input inputs data files input_files train_file",
            "out": "output output_file output_path output_prefix save_path",
            "text_field": "text_column json_keys key",
        },
        settings=FLAGS,
    )
    flags.add_argument(
        "sources",
        nargs="+",
        metavar="FILE",
        help=(
            "file, glob, folder, URL or `stdlib`: text, .jsonl .json .csv .parquet .arrow, also"
            " with .gz .zst .bz2 .xz"
        ),
    )
    flags.add_argument(
        "--tokenizer",
        metavar="PATH",
        default="bytes",
        help="`bytes`, or path or URL of a tokenizer.json (default: %(default)s)",
    )
    flags.add_argument(
        "--out", metavar="NAME.bin", required=True, help="file to write; it must not exist"
    )
    flags.add_argument(
        "--eos",
        metavar="TOKEN",
        help=(
            "token that ends a document (default: the one that files beside the tokenizer name,"
            " else a usual name)"
        ),
    )
    flags.add_argument(
        "--text-field",
        metavar="NAME",
        default="text",
        help="JSON field or table column that holds the text (default: %(default)s)",
    )
    flags.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="skip and count lines that are not a document (default: the first is an error)",
    )
    return flags


def main() -> None:
    flags = parser()
    given = flags.read()
    out = local_path(given["out"], what="--out", do="write a file here, and copy it to the store")
    skipped_input = SkippedInput()
    with flags.own_words():
        tokenizer = load_tokenizer(given["tokenizer"], given["eos"])
        documents = read_documents(
            given["sources"],
            given["text_field"],
            skip_bad_lines=given["skip_bad_lines"],
            skipped_input=skipped_input,
        )
        header = write_token_file(
            out, encode_documents(tokenizer, documents), tokenizer, skipped_input
        )
    print(
        f"{out}: {header.num_documents:,} documents, {header.num_tokens:,} tokens of {header.dtype}"
    )
    if given["tokenizer"] != BYTES:
        print(f"documents end with {tokenizer.end}")
    for note in (*skipped_input.notes(), *tokenizer.notes):
        print(f"note: {note}", file=sys.stderr)
