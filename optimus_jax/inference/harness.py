"""A model as EleutherAI's lm-evaluation-harness measures one (extra `lm-eval`).

A published model reads texts as its tokenizer begins them, with a BOS token if it has one; a run
learns and reads texts without. What is scored without a context follows that token, or the end of a
document. Special tokens that a task writes out, and chat templates, are not applied.
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from optimus_jax.errors import ConfigError, DataError, counted, explain
from optimus_jax.inference.generation import Prompt
from optimus_jax.inference.text_model import GenerationSettings, TextModel

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ConfigError(
        explain(
            "lm-evaluation-harness is not installed",
            given=str(error),
            do="pip install 'optimus-jax[lm-eval]'",
        )
    ) from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

MAX_NEW_TOKENS = 256
"""Most tokens of an answer whose task names no number: the harness's own default."""
Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context, at least one, and of what follows it."""


class HarnessModel(TemplateLM):
    """A model that scores and continues texts for the harness.

    Args:
      model: on devices of this process.
      batch_size: most texts that are scored or continued at once.
    """

    def __init__(self, model: TextModel, *, batch_size: int = 8) -> None:
        super().__init__()
        self._model = model
        self._batch_size = batch_size
        self._begin = list(model.begin)
        self._num_asked: Counter[str] = Counter()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._model.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return self._begin[-1] if self._begin else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Positions that the model was trained on, or has."""
        return self._model.limit()

    @property
    def tokenizer_name(self) -> str:
        """Tells tokenizers apart in the harness's cache of requests."""
        return self._model.tokenizer.digest

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text, after the tokens that begin one (unless `add_special_tokens` is
        False)."""
        begin = [] if add_special_tokens is False else self._begin
        return [*begin, *self._model.tokenizer.encode(string).tolist()]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [
            (context or [self.prefix_token_id], following) for _, context, following in requests
        ]
        scores = self._scores(pairs, disable_tqdm)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(
        self, requests: "Sequence[Instance]", disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, each token given as much before it as the model reads."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scores = iter(self._scores([pair for each in windows for pair in each], disable_tqdm))
        sums = [sum(next(scores)[0] for _ in each) for each in windows]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _scores(self, pairs: Sequence[Pair], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Log-probability of what follows each context, and whether it is the likeliest.

        A context is cut at its beginning to the model's positions.

        Raises DataError if what follows alone is longer than these.
        """
        limit = self.max_length
        if (longest := max((len(following) for _, following in pairs), default=0)) > limit:
            raise DataError(
                explain(
                    "an answer is longer than what the model reads",
                    given=f"{counted(longest, 'token')}, {limit} positions",
                    do="leave out that task, or train on longer texts",
                )
            )
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        scored = [index for index, (_, following) in enumerate(pairs) if following]
        texts = [[*pairs[index][0], *pairs[index][1]][-(limit + 1) :] for index in scored]
        scores = self._model.scores(texts, batch_size=self._batch_size)
        shown: Any = tqdm(scores, total=len(texts), desc="Scoring", disable=disable_tqdm)
        for place, logs, likeliest in shown:
            count = len(pairs[scored[place]][1])
            results[scored[place]] = (
                float(logs[-count:].sum(dtype="float64")),
                bool(likeliest[-count:].all()),
            )
        return results

    def generate_until(
        self, requests: "Sequence[Instance]", disable_tqdm: bool = False
    ) -> list[str]:
        """The texts that follow some contexts, each up to the first of its `until`."""
        asked = [self._asked(*request.args) for request in requests]
        texts: list[str] = []
        with tqdm(total=len(asked), desc="Generating", disable=disable_tqdm) as shown:
            for settings, group in groupby(asked, key=lambda each: each[1]):
                prompts = [prompt for prompt, _ in group]
                found = self._model.continue_each(prompts, settings, batch_size=self._batch_size)
                for (text,) in found:
                    self.cache_hook.add_partial("generate_until", requests[len(texts)].args, text)
                    texts.append(text)
                    shown.update()
        return texts

    def _asked(self, context: str, given: Mapping[str, Any]) -> tuple[Prompt, GenerationSettings]:
        """The tokens of a context, and how they are continued, by the harness's settings of a
        generation. Asked again, a drawn text is another one.
        """
        settings = dict(given)
        until = settings.pop("until", None) or ()
        stop = [until] if isinstance(until, str) else [text for text in until if text]
        new_tokens = [
            settings.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens")
        ]
        asked = next((number for number in new_tokens if number), MAX_NEW_TOKENS)
        count = min(asked, max(1, self.max_length // 2))  # leaves room for the context
        if count < asked:
            warnings.warn(
                f"answers are cut at {count} tokens, half of the model's {self.max_length}"
                f" positions, where {asked} are allowed",
                stacklevel=2,
            )
        temperature = settings.pop("temperature", None)
        is_drawn = settings.pop("do_sample", bool(temperature))
        known = {name: settings.pop(name) for name in ("top_k", "top_p") if name in settings}
        if settings.pop("num_beams", 1) != 1 or settings:
            raise ConfigError(
                explain(
                    "a generation has settings that are not known here",
                    given=", ".join(f"{name}={value}" for name, value in given.items()),
                    do="use until, max_gen_toks, do_sample, temperature, top_k, top_p",
                )
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        again = f"{context}\0{sorted(given.items(), key=str)}"
        self._num_asked[again] += 1
        prompt = Prompt(
            ids=np.array(ids[-max(1, self.max_length - count + 1) :], np.int32),
            num_new_tokens=count,
            seed=self._num_asked[again] - 1,
        )
        temperature = (temperature or 1.0) if is_drawn else 0.0
        return prompt, GenerationSettings(
            temperature=temperature, stop=stop, **(known if is_drawn else {})
        )
