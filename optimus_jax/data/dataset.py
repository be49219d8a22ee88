"""A `DataConfig` made into what a run trains on: two streams and their tokenizer."""

from dataclasses import dataclass

import numpy as np

from optimus_jax.config import DataConfig
from optimus_jax.data.sampler import count_examples
from optimus_jax.data.sources import TOKEN_SUFFIX, find_files, read_documents
from optimus_jax.data.tokenizers import Tokenizer, encode_documents, load_tokenizer
from optimus_jax.data.tokens import TokenStream, check_vocab, content_digest, read_token_file, split


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """What a run trains on."""

    train: TokenStream
    """Tokens to learn from."""
    held_out: TokenStream | None
    """Tokens to evaluate on; None if data.eval_fraction is 0."""
    tokenizer: Tokenizer
    """What made the tokens."""
    description: str
    """All of it in one line."""
    identity: dict[str, int | str]
    """What tells this data from other data, cheaply: JSON values."""


def load_data(config: DataConfig, *, seq_len: int, vocab_size: int, model_name: str) -> Data:
    """Read, tokenize, check and split the data. One token file is mapped, all else is held in memory.

    Shows progress on a terminal, so no other display of `rich` should be live.

    Args:
      seq_len: tokens per example.
      vocab_size: token ids that the model knows.
      model_name: what to call the model in messages.
    Raises:
      DataError: a source, the tokenizer or a token cannot be used.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    files = find_files(config.sources)
    if len(config.sources) == len(files) == 1 and files[0].suffix == TOKEN_SUFFIX:
        stream, header = read_token_file(files[0], tokenizer)
        num_documents = header.num_documents
    else:
        tokens = np.concatenate(list(encode_documents(tokenizer, read_documents(config.sources, config.text_field))))
        stream = TokenStream(name=" ".join(config.sources), tokens=tokens, eos=tokenizer.eos,
                             vocab_size=tokenizer.vocab_size)
        num_documents = int(np.count_nonzero(tokens == tokenizer.eos))
    check_vocab(stream, vocab_size, model_name)
    train, held_out = split(stream, config.eval_fraction)
    description = (f"{stream.name}: {len(stream):,} tokens ({stream.tokens.nbytes:,} bytes as {stream.tokens.dtype}) "
                   f"in {num_documents:,} documents; {count_examples(train, seq_len):,} examples of {seq_len:,} tokens "
                   f"to train on, {len(held_out) if held_out else 0:,} tokens held out")
    identity = {"tokens": len(stream), "documents": num_documents, "content": content_digest(stream), "tokenizer": tokenizer.digest}
    return Data(train=train, held_out=held_out, tokenizer=tokenizer, description=description, identity=identity)
