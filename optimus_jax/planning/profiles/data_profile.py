"""Profile a token stream: its size, its documents, how well windows pack them, and batch sizes.

Examples are windows of the stream (data/sampler.py). Documents follow one another without gaps, so
rows are never padded. Three things are lost: the tokens after the last window, the loss at document
borders, and attention across a document border or beyond the window.

A stream on disk is read block by block and never held in memory. If it is longer than the limit,
evenly spaced blocks are sampled, and the profile says how many tokens were read.

Conversations are profiled as they are packed (data/pieces.py).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from optimus_jax.data.pieces import Pieces
from optimus_jax.data.sampler import Examples, count_examples
from optimus_jax.data.tokens import TokenStream

MAX_TOKENS_READ = 1 << 29
"""Default maximum number of tokens read: a gigabyte of uint16, which takes about a second."""
BLOCK_TOKENS = 1 << 22
"""Tokens read at once: 8 to 16 MB, plus an eighth of that for the document ends found."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
MIN_STEPS_PER_EPOCH = 100
"""Minimum number of steps per epoch for a suggested batch size, so that the seed has an effect on
what a batch contains."""


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """A suggested global batch."""

    global_batch: int
    """Examples per step."""
    tokens: int
    """Tokens per step."""
    steps_per_epoch: float
    """Steps until every example was seen once."""


@dataclass(frozen=True, kw_only=True)
class DataProfile:
    """The profile of a stream cut into windows of one length. Shares are between 0 and 1."""

    name: str
    """Source of the tokens."""
    num_bytes: int
    """Bytes of the token ids as stored."""
    num_tokens: int
    """Token ids, end-of-document tokens included."""
    tokens_read: int
    """Tokens that were read; if fewer than all, document counts and shares are estimates."""
    num_documents: int
    """Number of documents, including a last one without an end token."""
    mean_length: float
    """Mean tokens per document, its end token included."""
    length_quantiles: dict[float, int]
    """Quantiles of tokens per document, by the share of documents that are no longer. Only
    documents read in full count."""
    seq_len: int
    """Tokens per example."""
    num_examples: int
    """Windows per epoch."""
    trained_share: float
    """Share of the windows' tokens whose loss counts: all but those that end a document."""
    whole_share: float
    """Share of the windows' tokens whose whole document lies within a single window."""
    attended_share: float
    """Share of the causal pairs of tokens in a window that lie within one document."""
    padded_share: float
    """For comparison: the share of positions that would hold a token if each document began a
    padded row of its own."""

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens in all windows."""
        return self.num_examples * self.seq_len

    @property
    def packing_efficiency(self) -> float:
        """Share of the stream's tokens whose loss counts in an epoch.

        Tokens after the last window do not count.
        """
        return self.trained_share * self.tokens_per_epoch / self.num_tokens

    @property
    def is_estimate(self) -> bool:
        """Whether only some of the tokens were read."""
        return self.tokens_read < self.num_tokens

    def steps_per_epoch(self, global_batch: int) -> float:
        """Steps until every example was seen once."""
        return self.num_examples / global_batch

    def batch_sizes(self, multiple_of: int = 1) -> tuple[BatchSize, ...]:
        """Suggested batches: `multiple_of` times 2^n or 3 * 2^n.

        Each leaves at least MIN_STEPS_PER_EPOCH steps per epoch.

        Args:
          multiple_of: number that must divide a batch: data x fsdp devices, times microbatches.
        """
        largest = self.num_examples // MIN_STEPS_PER_EPOCH
        factors = sorted(
            base << power for base in (1, 3) for power in range(max(1, largest).bit_length())
        )
        return tuple(
            BatchSize(
                global_batch=batch,
                tokens=batch * self.seq_len,
                steps_per_epoch=self.steps_per_epoch(batch),
            )
            for batch in (multiple_of * factor for factor in factors)
            if batch <= largest
        )

    def warnings(self, *, global_batch: int, steps: int) -> tuple[str, ...]:
        """Warnings about a run of `steps` steps with such batches; empty if there are none."""
        found, epochs = [], steps / self.steps_per_epoch(global_batch)
        if global_batch > self.num_examples:
            found.append(
                f"a batch of {global_batch:,} examples is more than the data has"
                f" ({self.num_examples:,}): each is in every batch"
                f" {global_batch / self.num_examples:.1f} times"
            )
        elif global_batch * MIN_STEPS_PER_EPOCH > self.num_examples:
            found.append(
                f"an epoch is only {self.steps_per_epoch(global_batch):.1f} steps of"
                f" {global_batch:,} examples"
            )
        if epochs > 1:
            found.append(f"{steps:,} steps see the data {epochs:.1f} times")
        return tuple(found)

    def to_json(self) -> str:
        """All figures as a JSON object."""
        return (
            json.dumps(
                asdict(self)
                | {
                    "tokens_per_epoch": self.tokens_per_epoch,
                    "packing_efficiency": self.packing_efficiency,
                },
                indent=2,
            )
            + "\n"
        )

    def describe(self) -> str:
        """Several lines for people."""
        lengths = ", ".join(
            f"{share:.0%} {tokens:,}" for share, tokens in self.length_quantiles.items()
        )
        batches = ", ".join(f"{size.global_batch:,}" for size in self.batch_sizes())
        return (
            "\n".join(
                [
                    f"{self.name}: {self.num_tokens:,} tokens ({self.num_bytes:,} bytes),"
                    f" {self.num_documents:,} documents"
                    + (
                        f" (estimated from {self.tokens_read:,} tokens)" if self.is_estimate else ""
                    ),
                    (
                        f"document length in tokens: mean {self.mean_length:,.0f}; share no longer"
                        f" than: {lengths or 'unknown'}"
                    ),
                    (
                        f"windows of {self.seq_len:,}: {self.num_examples:,} examples,"
                        f" {self.tokens_per_epoch:,} tokens per epoch"
                    ),
                    (
                        f"packing: {self.packing_efficiency:.2%} of the tokens are trained on"
                        f" (padded rows would be {self.padded_share:.1%} full);"
                        f" {self.whole_share:.1%} of tokens have their whole document in their"
                        f" window; attention within documents {self.attended_share:.1%} of that in"
                        " whole windows"
                    ),
                    (
                        f"global batches that leave {MIN_STEPS_PER_EPOCH} steps per epoch:"
                        f" {batches or 'none'}"
                    ),
                ]
            )
            + "\n"
        )


def profile_data(
    stream: Examples,
    *,
    seq_len: int,
    respect_documents: bool = True,
    max_tokens: int = MAX_TOKENS_READ,
) -> DataProfile:
    """The profile of a stream, or of conversations, cut into examples of `seq_len` tokens.

    Args:
      respect_documents: whether attention and loss stop at document borders.
      max_tokens: approximate maximum number of tokens read.
    """
    if isinstance(stream, Pieces):
        return _profile_pieces(stream, seq_len)
    assert isinstance(stream, TokenStream), "sources of a mixture are profiled one by one"
    num_examples = count_examples(stream, seq_len)
    found = _StreamCounts(seq_len, in_windows=num_examples * seq_len)
    for block, ends in _document_ends(stream, max_tokens, seq_len):
        found.add(block, ends)
    lengths = found.lengths()
    has_open_end = len(stream) > 0 and int(stream.tokens[-1]) != stream.eos
    num_documents = round(found.num_ends * len(stream) / max(1, found.tokens_read)) + has_open_end
    return DataProfile(
        name=stream.name,
        num_bytes=stream.tokens.nbytes,
        num_tokens=len(stream),
        tokens_read=found.tokens_read,
        num_documents=num_documents,
        mean_length=len(stream) / max(1, num_documents),
        seq_len=seq_len,
        num_examples=num_examples,
        length_quantiles=_quantiles(lengths),
        trained_share=(
            1 - found.ends_in_windows / max(1, found.windowed) if respect_documents else 1.0
        ),
        attended_share=found.pairs_within / max(1, found.pairs) if respect_documents else 1.0,
        whole_share=found.whole / max(1, found.windowed),
        padded_share=(
            float(lengths.sum() / (-(-lengths // seq_len) * seq_len).sum()) if len(lengths) else 1.0
        ),
    )


def _quantiles(lengths: NDArray[np.int64]) -> dict[float, int]:
    if not len(lengths):
        return {}
    values = np.quantile(lengths, QUANTILES, method="inverted_cdf").tolist()
    return dict(zip(QUANTILES, values, strict=True))


def _profile_pieces(whole: Pieces, seq_len: int) -> DataProfile:
    """The profile of conversations: a document is one of them, and a window is an example."""
    used, packing = whole.packing(seq_len)
    sizes = np.minimum(whole.sizes[used], seq_len)
    places = max(1, packing.num_examples * seq_len)
    padding = [seq_len - int(sizes[packing[n]].sum()) for n in range(packing.num_examples)]
    lengths = np.diff(whole.starts)
    return DataProfile(
        name=whole.name,
        num_bytes=whole.tokens.nbytes,
        num_tokens=len(whole),
        tokens_read=len(whole),
        num_documents=whole.num_texts,
        mean_length=float(lengths.mean()),
        seq_len=seq_len,
        num_examples=packing.num_examples,
        length_quantiles=_quantiles(lengths),
        trained_share=whole.count_targets(seq_len) / places,
        whole_share=int(sizes[whole.sizes[used] <= seq_len].sum()) / places,
        attended_share=int((sizes**2).sum() + (np.array(padding) ** 2).sum()) / (places * seq_len),
        padded_share=float(sizes.sum() / max(1, len(sizes) * seq_len)),
    )


def _document_ends(
    stream: TokenStream, max_tokens: int, seq_len: int
) -> Iterator[tuple[range, NDArray[np.int64]]]:
    """Yield blocks of the stream, each with the positions just after the documents that end in it.

    Every block begins with a window.
    """
    block = max(1, min(BLOCK_TOKENS, max_tokens) // seq_len) * seq_len
    num_blocks = math.ceil(len(stream) / block)
    num_read = num_blocks if len(stream) <= max_tokens else max(1, max_tokens // block)
    for index in np.linspace(0, num_blocks - 1, num_read).astype(int).tolist():
        tokens = np.asarray(stream.tokens[index * block : (index + 1) * block])
        yield (
            range(index * block, index * block + len(tokens)),
            index * block + 1 + np.flatnonzero(tokens == stream.eos),
        )


class _StreamCounts:
    """Sums over blocks, which must be added in stream order.

    All counts are of tokens, or of pairs of tokens.
    """

    def __init__(self, seq_len: int, in_windows: int):
        self._seq_len, self._in_windows = seq_len, in_windows
        self._lengths: list[NDArray[np.int64]] = []
        self._stop = 0
        """End of the last block."""
        self._begin: int | None = 0
        """Start of the document that continues beyond the last block; None if its start was not
        read."""
        self.tokens_read = self.num_ends = 0
        self.windowed = self.ends_in_windows = self.whole = 0
        """Tokens in windows; how many of them end a document; and how many have their whole
        document in their window."""
        self.pairs = self.pairs_within = 0
        """Sum of seq_len^2 over windows (twice the pairs of tokens); the same within documents."""

    def add(self, block: range, ends: NDArray[np.int64]) -> None:
        """Add a block, and the positions just after the documents that end in it."""
        if block.start != self._stop:
            self._begin = None
        borders = ends if self._begin is None else np.concatenate([[self._begin], ends])
        self._lengths.append(np.diff(borders))
        self._begin, self._stop = int(borders[-1]) if len(borders) else None, block.stop
        self.tokens_read += len(block)
        self.num_ends += len(ends)
        self._add_windows(
            range(block.start, min(block.stop, self._in_windows)),
            borders[borders <= self._in_windows],
        )

    def _add_windows(self, block: range, borders: NDArray[np.int64]) -> None:
        """Add whole windows and the document borders in them. The first border may lie before the
        block.
        """
        windows = np.arange(block.start, block.stop + 1, self._seq_len)
        ends = borders[borders > block.start]
        self.windowed += len(block)
        self.ends_in_windows += len(ends)
        first, last = borders[:-1], borders[1:] - 1
        self.whole += int((last + 1 - first)[first // self._seq_len == last // self._seq_len].sum())
        self.pairs_within += int((np.diff(np.union1d(windows, ends)) ** 2).sum())
        self.pairs += len(block) * self._seq_len

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document whose start and end were read."""
        return np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int64)
