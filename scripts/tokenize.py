"""Tokenize text files into one .bin file, to train on without tokenizing again."""

import os
import sys

# Python puts the folder of a script first on the path, and there this file would take the place of
# the standard module `tokenize`, which inspect and linecache import, and jax with them.
if (folder := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(folder)

from argparse import ArgumentDefaultsHelpFormatter
from pathlib import Path

from optimus_jax.command_line import Parser, run
from optimus_jax.data.sources import read_documents
from optimus_jax.data.tokenizers import encode_documents, load_tokenizer
from optimus_jax.data.tokens import write_token_file


def parser() -> Parser:
    """Every flag."""
    flags = Parser(description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter,
                   words={"sources": "input inputs data files input_files train_file", "out": "output output_file output_path output_prefix save_path", "text_field": "text_column json_keys key"})
    flags.add_argument("sources", nargs="+", metavar="FILE", help="text, JSONL or Parquet file, glob, or `stdlib`")
    flags.add_argument("--tokenizer", default="bytes", help="`bytes`, or path of a tokenizer.json")
    flags.add_argument("--out", type=Path, required=True, help="NAME.bin to write; it must not exist")
    flags.add_argument("--text-field", default="text", help="name of the text in a JSONL line or Parquet column")
    return flags


def main() -> None:
    given = parser().read()
    tokenizer = load_tokenizer(given["tokenizer"])
    documents = read_documents(given["sources"], given["text_field"])
    header = write_token_file(given["out"], encode_documents(tokenizer, documents), tokenizer)
    print(f"{given['out']}: {header.num_documents:,} documents, {header.num_tokens:,} tokens of {header.dtype}")


if __name__ == "__main__":
    sys.exit(run(main))
