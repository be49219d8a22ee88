"""Conversations as tokens: what their template wrote, and which of it counts."""

from collections.abc import Collection, Iterable

import numpy as np

from optimus_jax.config.data import EVERY_ROLE, TooLong
from optimus_jax.data.pieces import Pieces, unit_of
from optimus_jax.data.record_names import ASSISTANT
from optimus_jax.data.rendered_chat import SELDOM_LEARNT, RenderedChat
from optimus_jax.data.token_ids import ChatTokens, token_dtype
from optimus_jax.data.tokenizers import Tokenizer, groups
from optimus_jax.errors import DataError, explain


def encode_conversations(
    tokenizer: Tokenizer,
    chats: Iterable[tuple[RenderedChat, ...]],
    name: str,
    too_long: TooLong,
    group_size: int = 1,
    loss_on: Collection[str] = (),
) -> tuple[Pieces, list[str]]:
    """All conversations as tokens, and notes about those that were left out.

    Shows progress while stderr is a terminal.

    Args:
      chats: each with the others that share its example, `group_size` in all.
      loss_on: roles that were asked for (data.loss_on), for notes.
    Raises:
      DataError: no token of any conversation counts.
    """
    found: list[ChatTokens] = []
    num_without, stops, roles = 0, False, set[str]()
    for group in groups(chats, lambda piece: sum(len(chat.text) for chat in piece)):
        tokens = iter(tokenizer.encode_chats([chat for piece in group for chat in piece]))
        for piece in group:
            encoded = [next(tokens) for _ in piece]
            roles = roles.union(*(chat.roles for chat in piece))
            if all(chat.counts[1:].any() for chat in encoded):
                found += encoded
                stops |= all(chat.stops for chat in piece)
            else:
                num_without += 1
    if not found:
        raise DataError(
            explain(
                f"no token of {name} counts in the loss",
                given=f"{num_without:,} {unit_of(group_size)}(s)"
                + (f" with the roles {', '.join(sorted(roles))}" if roles else "")
                + f"; data.loss_on={','.join(loss_on)}",
                do=_what_may_count(roles, loss_on),
            )
        )
    notes = []
    if roles and (absent := sorted({*loss_on} - {EVERY_ROLE} - roles)):
        notes.append(
            f"no message of {name} has the role {' or '.join(map(repr, absent))} (data.loss_on);"
            f" there are {', '.join(sorted(roles))}"
        )
    if num_without:
        notes.append(
            f"{num_without:,} {unit_of(group_size)}(s) of {name} left out, because no token of them"
            " counts (data.loss_on)"
        )
    if not stops:
        notes.append(
            f"what counts of {name} never ends with a special token, so the model will not learn"
            " to end its turn: let the chat template write one after it, such as {{ eos_token }}"
            " (within {% generation %}, if it has that)"
        )
    conversations = Pieces(
        name=name,
        tokens=np.concatenate(
            [chat.ids for chat in found], dtype=token_dtype(tokenizer.vocab_size)
        ),
        counts=np.concatenate([chat.counts for chat in found]),
        starts=np.concatenate([[0], np.cumsum([len(chat.ids) for chat in found])]),
        vocab_size=tokenizer.vocab_size,
        too_long=too_long,
        group_size=group_size,
    )
    return conversations, notes


def _what_may_count(roles: Collection[str], loss_on: Collection[str]) -> str:
    """Advice on data.loss_on where nothing counts, by the roles that there are."""
    if roles and not {*roles} & {*loss_on}:
        usual = sorted({*roles} - SELDOM_LEARNT) or sorted(roles)
        chosen = ASSISTANT if ASSISTANT in usual else ",".join(usual)
        return f"name roles that are there, such as: --set data.loss_on={chosen}"
    return (
        "give conversations whose messages are not empty, a chat template that writes them"
        " (--set data.chat_template=FILE), or count every token: --set data.loss_on=all"
    )
