"""Tokenize text files into one .bin file, to train on without tokenizing again."""

import os
import sys

# Python puts the folder of a script first on the path, and there this file would take the place of
# the standard module `tokenize`, which inspect and linecache import, and jax with them.
if (folder := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(folder)

import argparse

from optimus_jax.data.sources import read_documents
from optimus_jax.data.tokenizers import encode_documents, load_tokenizer
from optimus_jax.data.tokens import write_token_file
from optimus_jax.environment import show_every_character
from optimus_jax.errors import OptimusError
from optimus_jax.paths import local_path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="FILE", help="text, JSONL or Parquet file, glob, URL, or `stdlib`")
    parser.add_argument("--tokenizer", default="bytes", help="`bytes`, or path of a tokenizer.json")
    parser.add_argument("--out", required=True, help="NAME.bin to write; it must not exist")
    parser.add_argument("--text-field", default="text", help="name of the text in a JSONL line or Parquet column")
    args = parser.parse_args()
    show_every_character()
    try:
        out = local_path(args.out, what="--out", do="write a file here, and copy it to the store")
        tokenizer = load_tokenizer(args.tokenizer)
        documents = read_documents(args.sources, args.text_field)
        header = write_token_file(out, encode_documents(tokenizer, documents), tokenizer)
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {header.num_documents:,} documents, {header.num_tokens:,} tokens of {header.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
