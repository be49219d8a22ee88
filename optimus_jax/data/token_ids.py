"""Token ids of conversations, and the dtype of token ids."""

from typing import NamedTuple

import numpy as np

from optimus_jax.data.rendered_chat import RenderedChat


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The dtype that stores ids below `vocab_size`."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class ChatTokens(NamedTuple):
    """A conversation as tokens."""

    ids: np.ndarray
    """Token ids, uint16 or uint32 [N]."""
    counts: np.ndarray
    """Whether each token counts in the loss when it is the target: bool [N]."""


def chat_tokens(chat: RenderedChat, ids: np.ndarray, spans: np.ndarray, eos: int) -> ChatTokens:
    """A conversation's ids [N], which stand for the characters `spans` [N, 2], with what counts."""
    counts = np.zeros(len(ids), bool)
    for start, stop in chat.counted:
        counts |= (spans[:, 1] > start) & (spans[:, 0] < stop)
    if chat.ends:
        ids = np.append(ids, ids.dtype.type(eos))
        counts = np.append(counts, chat.end_counts)
    return ChatTokens(ids, counts)
