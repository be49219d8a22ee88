"""Loads the training and held-out tokens, and their tokenizer, from a `DataConfig`.

Sources without weights form one stream of texts, or are all conversations. Sources with weights are
loaded one by one, and mixed.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from optimus_jax.config import DataConfig, ModelConfig
from optimus_jax.config.data import STDLIB, ExampleKind
from optimus_jax.config.in_python import not_given
from optimus_jax.config.weighted_sources import WeightedSource
from optimus_jax.data.conversations import encode_conversations
from optimus_jax.data.given import (
    NAME,
    RandomAccess,
    document_reader,
    given_in_python,
    read_given,
    tokens_given,
)
from optimus_jax.data.identity import HELD_OUT_CONTENT, DataIdentity, identity_of
from optimus_jax.data.images import read_images, scaling_text
from optimus_jax.data.iterated import IteratedExamples, has_state
from optimus_jax.data.labelled import (
    AnswerReader,
    LabelledRecord,
    LabelledSpan,
    LabelledText,
    LabelledWords,
    LabelPlace,
    LabelReader,
    encode_labelled,
)
from optimus_jax.data.mixture import HeldOutMixture, Mixture, period_counts
from optimus_jax.data.named_files import FileExamples
from optimus_jax.data.pieces import Pieces, split_pieces
from optimus_jax.data.preferences import PAIRS_OR_OTHER_TASK, PreferenceReader
from optimus_jax.data.record_reader import RecordReader
from optimus_jax.data.recordings import prompt_text, read_recordings
from optimus_jax.data.rendered_chat import ChatWriter, RenderedChat
from optimus_jax.data.sampler import Examples, count_examples
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.data.sources import find_files, is_token_file, read_documents
from optimus_jax.data.tokenizers import Tokenizer, encode_documents, load_tokenizer
from optimus_jax.data.tokens import (
    HeldOutBy,
    TokenHeader,
    TokenStream,
    check_vocab,
    held_out_by,
    read_token_files,
    split,
)
from optimus_jax.errors import DataError, explain

RULES: tuple[HeldOutBy, ...] = get_args(HeldOutBy)
OF_TEXTS = ("documents", "texts")
"""Kinds of examples that texts without labels become."""
NONE_OF_ITERATOR = (
    "nothing of an iterator is held out; give eval_data, or measure with optimus_jax.evaluate"
)
_KINDS = {
    str: "texts",
    RenderedChat: "conversations",
    tuple: "preference pairs",
    LabelledText: "texts with labels",
    LabelledWords: "words with labels",
    LabelledSpan: "questions with answers",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """The loaded data of a run."""

    train: Examples
    """Tokens to learn from."""
    held_out: Examples | None
    """Tokens to evaluate on; None if there are none."""
    tokenizer: Tokenizer
    """The tokenizer that made the tokens."""
    description: str
    """Summary in one line."""
    identity: DataIdentity
    """Fingerprint that tells this data from other data."""
    notes: tuple[str, ...] = ()
    """Sentences about text that was left out or changed while reading the files."""
    labels: tuple[str, ...] = ()
    """Names of the labels that are learnt; empty: none are."""

    def with_held_out(self, other: "Data", name: str) -> "Data":
        """The same data, with all of another one to evaluate on, which has this name."""
        return dataclasses.replace(
            self,
            held_out=mixed(other.train),
            description=f"{self.description}; evaluated on {name}",
            identity={**self.identity, HELD_OUT_CONTENT: _digest(other.identity)},
            notes=(*[note for note in self.notes if note != NONE_OF_ITERATOR], *other.notes),
        )

    def with_notes(self, notes: Iterable[str]) -> "Data":
        """The same data with more notes, which come first."""
        return dataclasses.replace(self, notes=(*notes, *self.notes))


def mixed(whole: Examples) -> Examples:
    """All examples, in an order in which the first ones have all labels."""
    return whole.mixed() if isinstance(whole, Pieces | FileExamples) else whole


def load_data(
    config: DataConfig,
    *,
    seq_len: int,
    vocab_size: int,
    model_name: str,
    tokenizer: Tokenizer | None = None,
    by: str | None = None,
    kind: ExampleKind = "documents",
    labels: tuple[str, ...] = (),
    label_place: LabelPlace = "first",
    values_for: ModelConfig | None = None,
    given: RandomAccess | Iterable[Any] | None = None,
    held_out: tuple[str, ...] = (),
    given_held_out: RandomAccess | None = None,
    suggests_labels: bool = False,
) -> Data:
    """Read, tokenize, check and split the data.

    Token files are mapped into memory; all other data is held in memory. Shows progress on a
    terminal, so no other `rich` display should be live.

    Args:
      seq_len: tokens per example.
      vocab_size: number of token ids that the model knows.
      model_name: name of the model in messages.
      tokenizer: the tokenizer of a resumed run; None: the one that the config names.
      by: how a resumed run chose its held-out tokens, which holds whatever the files are now: a
        HeldOutBy, or one for each source of a mixture with blanks between; None: `held_out_by`
        decides.
      kind: what records hold.
      labels: names of their labels, in order; empty: those that are found.
      label_place: where the label of a text counts.
      values_for: the model that reads images or sound, of which sources then consist.
      given: the records or token ids that a program gives, if the sources stand for these; an
        iterator of them has a state (data/iterated.py).
      held_out: sources of held-out data; empty: a share of the data is held out.
      given_held_out: the same of what a program gives, if `held_out` stands for it.
      suggests_labels: whether a note says so if texts that are learnt alone have labels.
    Raises:
      ConfigError: the sources stand for data of a program, and none is given.
      DataError: a source, the tokenizer or a token cannot be used.
    """
    tokenizer = tokenizer or load_tokenizer(
        config.tokenizer, config.eos, chat_template=config.chat_template
    )
    if held_out:
        config = dataclasses.replace(config, eval_fraction=0.0)
    loader = _SourceLoader(
        config=config,
        tokenizer=tokenizer,
        seq_len=seq_len,
        vocab_size=vocab_size,
        model_name=model_name,
        kind=kind,
        labels=labels,
        label_place=label_place,
        values_for=values_for,
        given=given,
        suggests_labels=suggests_labels,
    )
    sources = [(source.path,) for source in config.mixture] or [config.sources]
    parts = list(map(loader.load, sources, _rules(by, len(sources))))
    data = _mixed(config.mixture, parts) if config.mixture else parts[0]
    if held_out:
        if given_held_out is None and given_in_python(held_out):
            raise not_given("evaluation.data", "eval_data")
        own = dataclasses.replace(loader, labels=data.labels or labels, given=given_held_out)
        name = " ".join(held_out) if given_held_out is None else "eval_data, given in Python"
        data = data.with_held_out(own.load(held_out, None), name)
    # Once for all sources: the tokenizer has counted over all of them.
    return dataclasses.replace(data, notes=(*data.notes, *tokenizer.notes))


def _rules(by: str | None, num_sources: int) -> list[HeldOutBy | None]:
    """How each source chooses its held-out tokens; None where its kind decides."""
    words = (by or "").split()
    given: list[HeldOutBy | None] = [rule for word in words for rule in RULES if rule == word]
    return given if len(given) == num_sources else [None] * num_sources


@dataclass(frozen=True, kw_only=True)
class _SourceLoader:
    """Loads sources that form one stream, or are all conversations."""

    config: DataConfig
    tokenizer: Tokenizer
    seq_len: int
    vocab_size: int
    """Of the model."""
    model_name: str
    kind: ExampleKind
    labels: tuple[str, ...]
    label_place: LabelPlace
    values_for: ModelConfig | None
    given: RandomAccess | Iterable[Any] | None
    suggests_labels: bool

    def load(self, sources: tuple[str, ...], by: HeldOutBy | None) -> Data:
        """The data of these sources.

        Args:
          by: how held-out tokens are chosen; None: their kind decides.
        """
        config, tokenizer = self.config, self.tokenizer
        if self.values_for is not None:
            model = self.values_for
            if given_in_python(sources):
                raise DataError(
                    explain(
                        f"{model.reads} are read from files",
                        given=f"{NAME}; {self.model_name} reads {model.reads}",
                        do="name a folder, a table or .tar files of them",
                    )
                )
            return (
                self._of_images(sources, model)
                if model.image_size
                else self._of_recordings(sources, model)
            )
        skipped_input = SkippedInput()
        is_given, name = given_in_python(sources), " ".join(sources)
        files = [] if is_given else find_files(sources, skipped_input)
        if files and STDLIB not in sources and all(map(is_token_file, files)):
            if self.kind not in OF_TEXTS:
                raise self._other_records(name)
            stream, headers = read_token_files(files, tokenizer)
            num_documents = sum(header.num_documents for header in headers)
            return self._of_stream(stream, headers, num_documents, by).with_notes(
                skipped_input.notes()
            )
        skipped_input = SkippedInput()
        records = self._reader()
        how: dict[str, Any] = {
            "skip_bad_lines": config.skip_bad_lines,
            "skipped_input": skipped_input,
            "records": records,
        }
        if is_given:
            given, name = self._given(), NAME
            if has_state(given):
                return self._of_iterator(given, how)
            assert isinstance(given, RandomAccess)
            if (stream := tokens_given(given, config.text_field, tokenizer)) is not None:
                if self.kind not in OF_TEXTS:
                    raise self._other_records(name)
                return self._of_stream(stream, (), None, by)
            documents = read_given(given, config.text_field, **how)
        else:
            documents = read_documents(sources, config.text_field, **how)
        first = next(documents, None)
        if first is None:
            raise DataError(
                explain("the data holds no text", given=name, do="name files that hold some")
            )
        whole = _of_one_kind(itertools.chain([first], documents), type(first), name)
        if self.kind not in OF_TEXTS and not isinstance(first, tuple):
            raise self._other_records(name)
        if self.kind in ("labels", "word_labels", "answers"):
            found = self._of_labelled(whole, name)
        elif self.kind == "texts" and isinstance(first, RenderedChat):
            # `loss_mask` says of a conversation's token whether the next one counts.
            raise DataError(
                explain(
                    f"{name} holds conversations, and the task hides tokens of texts",
                    given="messages, or prompts with completions",
                    do="give texts: --set data.records=text --set data.text_field=NAME names the"
                    " field with one",
                )
            )
        elif self.kind == "pairs" or isinstance(first, RenderedChat):
            pieces = whole if self.kind == "pairs" else ((chat,) for chat in whole)
            found = self._of_conversations(pieces, name)
        else:
            tokens = np.concatenate(list(encode_documents(tokenizer, whole)))
            stream = TokenStream(
                name=name, tokens=tokens, eos=tokenizer.eos, vocab_size=tokenizer.vocab_size
            )
            found = self._of_stream(stream, (), None, by)
        return found.with_notes([*records.notes(name), *skipped_input.notes()])

    def _given(self) -> RandomAccess | Iterable[Any]:
        if self.given is None:
            raise not_given("data.sources", "data")
        return self.given

    def _of_iterator(self, items: Any, how: Mapping[str, Any]) -> Data:
        """The data of an iterator with a state.

        Args:
          how: arguments of `document_reader`.
        """
        config, tokenizer = self.config, self.tokenizer
        if self.kind not in OF_TEXTS:
            raise self._other_records(NAME)
        read = document_reader(config.text_field, tokenizer, **how)

        def tokens_of(item: Any, number: int) -> np.ndarray:
            tokens = read(item, number)
            document = TokenStream(
                name=NAME, tokens=tokens, eos=tokenizer.eos, vocab_size=tokenizer.vocab_size
            )
            if len(tokens):
                check_vocab(document, self.vocab_size, self.model_name)
            return tokens

        train = IteratedExamples(
            name=NAME,
            items=items,
            tokens_of=tokens_of,
            eos=tokenizer.eos,
            vocab_size=tokenizer.vocab_size,
        )
        return Data(
            train=train,
            held_out=None,
            tokenizer=tokenizer,
            description=f"{NAME}: the documents of an iterator, in its own order",
            identity={
                "tokens": 0,
                "content": train.digest,
                "documents": 0,
                "tokenizer": tokenizer.digest,
                "eos": tokenizer.eos,
                "held_out_by": "documents",
            },
            notes=(NONE_OF_ITERATOR,),
        )

    def _of_images(self, sources: tuple[str, ...], model: ModelConfig) -> Data:
        config = self.config
        whole, notes = read_images(
            sources,
            model,
            image_field=config.image_field,
            label_field=(config.label_field or "label") if self.kind == "images" else None,
            labels=self.labels,
        )
        train, held_out = whole.split(config.eval_fraction)
        num_held_out = 0 if held_out is None else len(held_out.items)
        return Data(
            train=train,
            held_out=held_out,
            tokenizer=self.tokenizer,
            description=(
                f"{whole.name}: {len(train.items):,} images"
                + (f" of {len(whole.labels)} labels," if whole.labels else ",")
                + f" {scaling_text(model)};"
                f" {num_held_out:,} images held out"
            ),
            identity={
                "tokens": len(whole),
                "content": whole.digest,
                "documents": len(whole.items),
                "tokenizer": self.tokenizer.digest,
                **({"labels": ",".join(whole.labels)} if whole.labels else {}),
                "eos": self.tokenizer.eos,
                "held_out_by": "documents",
            },
            labels=whole.labels,
            notes=(*notes, *whole.slow_notes()),
        )

    def _of_recordings(self, sources: tuple[str, ...], model: ModelConfig) -> Data:
        config, tokenizer = self.config, self.tokenizer
        lengths = [phase.seq_len for phase in config.phases if phase.seq_len]
        whole, notes = read_recordings(
            sources, model, tokenizer, config, seq_len=min([self.seq_len, *lengths])
        )
        check_vocab(
            TokenStream(
                name=whole.name,
                tokens=np.concatenate([each.tokens for each in whole.items]),
                eos=tokenizer.eos,
                vocab_size=tokenizer.vocab_size,
            ),
            self.vocab_size,
            self.model_name,
        )
        train, held_out = whole.split(config.eval_fraction)
        num_held_out = 0 if held_out is None else len(held_out.items)
        asked = prompt_text(tokenizer, config)
        return Data(
            train=train,
            held_out=held_out,
            tokenizer=tokenizer,
            description=(
                f"{whole.name}: {len(train.items):,} recordings with texts;"
                f" {num_held_out:,} recordings held out"
                + (f"; the model is {asked}" if asked else "")
            ),
            identity={
                "tokens": len(whole),
                "content": whole.digest,
                "documents": len(whole.items),
                "tokenizer": tokenizer.digest,
                "eos": tokenizer.eos,
                "held_out_by": "documents",
            },
            notes=(*notes, *whole.slow_notes()),
        )

    def _reader(self) -> RecordReader:
        """What reads the records of these sources."""
        config, tokenizer = self.config, self.tokenizer
        shared: dict[str, Any] = {
            "text_field": config.text_field,
            "write_out": ChatWriter(
                template=tokenizer.chat_template,
                special_tokens=tokenizer.special_tokens,
                loss_on=config.loss_on,
                has_end_of_turn=bool(tokenizer.special_tokens),
            ),
        }
        if self.kind == "pairs":
            return PreferenceReader(kind="completion", **shared)
        if self.kind in OF_TEXTS:
            suggests = self.suggests_labels and self.kind == "texts"
            label = (config.label_field or "label") if suggests else None
            return RecordReader(kind=config.records, possible_label=label, **shared)
        if self.kind == "answers":
            return AnswerReader(kind="completion", **shared)
        words = self.kind == "word_labels"
        return LabelReader(
            kind="completion",
            label_field=config.label_field or ("labels" if words else "label"),
            second_field=config.second_text_field,
            reads_words=words,
            **shared,
        )

    def _other_records(self, name: str) -> DataError:
        """The error for sources without the records from which the task learns."""
        reader = self._reader()
        do = PAIRS_OR_OTHER_TASK if self.kind == "pairs" else reader.if_absent(())
        return DataError(
            explain(
                f"the data holds no {reader.wanted}, from which the task learns",
                given=name,
                do=f"{do}; records are read from JSON, CSV, Parquet and Arrow files",
            )
        )

    def _of_stream(
        self,
        stream: TokenStream,
        headers: Sequence[TokenHeader],
        num_documents: int | None,
        by: HeldOutBy | None,
    ) -> Data:
        """The data of a stream.

        Args:
          num_documents: None: as many as there are ends of documents.
        """
        config, tokenizer, seq_len = self.config, self.tokenizer, self.seq_len
        if num_documents is None:
            num_documents = int(np.count_nonzero(stream.tokens == stream.eos))
        check_vocab(stream, self.vocab_size, self.model_name)
        by = by or held_out_by(stream)
        train, held_out = split(stream, config.eval_fraction, by)
        description = (
            f"{stream.name}: {len(stream):,} tokens ({stream.tokens.nbytes:,} bytes as"
            f" {stream.tokens.dtype}) in {num_documents:,} documents;"
            f" {count_examples(train, seq_len):,} examples of {seq_len:,} tokens to train on,"
            f" {len(held_out) if held_out else 0:,} tokens held out"
        )
        notes = []
        if skipped := sum(header.bad_lines for header in headers):
            notes.append(f"{skipped:,} bad line(s) were skipped when the tokens were made")
        identity = {
            **identity_of(stream, headers),
            "documents": num_documents,
            "tokenizer": tokenizer.digest,
            "eos": tokenizer.eos,
            "held_out_by": by,
        }
        return Data(
            train=train,
            held_out=held_out,
            tokenizer=tokenizer,
            description=description,
            identity=identity,
            notes=tuple(notes),
        )

    def _of_conversations(self, pieces: Iterable[tuple[RenderedChat, ...]], name: str) -> Data:
        config, tokenizer = self.config, self.tokenizer
        group_size = 2 if self.kind == "pairs" else 1
        whole, notes = encode_conversations(
            tokenizer, pieces, name, config.too_long, group_size, config.loss_on
        )
        template = tokenizer.chat_template
        made_by = {} if template is None else {"chat_template": template.digest}
        return self._of_pieces(whole, name, made_by).with_notes(notes)

    def _of_labelled(self, texts: Iterable[LabelledRecord], name: str) -> Data:
        config = self.config
        lengths = [phase.seq_len for phase in config.phases if phase.seq_len]
        whole, labels, notes = encode_labelled(
            self.tokenizer,
            texts,
            name,
            place=self.label_place,
            labels=self.labels,
            longest=max([self.seq_len, *lengths]),
            too_long=config.too_long,
        )
        found = self._of_pieces(whole, name, {"labels": ",".join(labels)}).with_notes(notes)
        return dataclasses.replace(found, labels=labels)

    def _of_pieces(self, whole: Pieces, name: str, made_by: Mapping[str, str]) -> Data:
        """The data of packed texts.

        Args:
          made_by: what belongs to its identity besides.
        """
        config, tokenizer, seq_len = self.config, self.tokenizer, self.seq_len
        if not config.respect_documents:
            raise DataError(
                explain(
                    f"{whole.unit}s that share an example must not see one another",
                    given="data.respect_documents=false",
                    do="leave it out",
                )
            )
        stream = TokenStream(
            name=name, tokens=whole.tokens, eos=tokenizer.eos, vocab_size=tokenizer.vocab_size
        )
        check_vocab(stream, self.vocab_size, self.model_name)
        train, held_out = split_pieces(whole, config.eval_fraction)
        lengths = dict.fromkeys([seq_len, *(phase.seq_len or seq_len for phase in config.phases)])
        return Data(
            train=train,
            held_out=held_out,
            tokenizer=tokenizer,
            description=(
                f"{name}: {len(whole):,} tokens in {whole.num_pieces:,} {whole.unit}s,"
                f" {int(whole.counts.sum()):,} of which count; {train.description(seq_len)},"
                f" {held_out.num_pieces if held_out else 0:,} {whole.unit}s held out"
            ),
            identity={
                **identity_of(stream, ()),
                "conversations": whole.digest,
                "documents": whole.num_texts,
                "tokenizer": tokenizer.digest,
                **made_by,
                "eos": tokenizer.eos,
                "held_out_by": "documents",
            },
            notes=tuple(note for n in lengths for note in whole.too_long_notes(n)),
        )


def _of_one_kind(documents: Iterable[Any], kind: type, name: str) -> Iterator[Any]:
    for document in documents:
        if type(document) is not kind:
            both = [_KINDS[each] for each in _KINDS if each in (kind, type(document))]
            raise DataError(
                explain(
                    f"{name} has both {' and '.join(both)}",
                    given=" ".join(sorted({_KINDS[kind], _KINDS[type(document)]})),
                    do="make a mixture of them: --data chat=0.5:PATH text=0.5:PATH",
                )
            )
        yield document


def _mixed(sources: Sequence[WeightedSource], parts: Sequence[Data]) -> Data:
    """The mixture of loaded sources."""
    if len({part.labels for part in parts}) > 1:
        raise DataError(
            explain(
                "sources of a mixture have different labels",
                given="; ".join(
                    f"{source.name}: {','.join(part.labels)}"
                    for source, part in zip(sources, parts, strict=True)
                ),
                do="name all of them, in order: --set model.labels=FIRST,SECOND",
            )
        )
    names = tuple(source.name for source in sources)
    weights = [source.exact_weight for source in sources]
    counts = period_counts(weights)
    notes = [note for part in parts for note in part.notes]
    if len({weight / count for weight, count in zip(weights, counts, strict=True)}) > 1:
        notes.append(
            "the weights of the mixture are rounded to "
            + ", ".join(f"{name} {n:,}" for name, n in zip(names, counts, strict=True))
            + f" of {sum(counts):,} examples"
        )
    content = [[count, part.identity] for count, part in zip(counts, parts, strict=True)]
    train = Mixture(names=names, parts=tuple(part.train for part in parts), counts=counts)
    held_out = [part.held_out for part in parts if part.held_out is not None]
    shares = "; ".join(
        f"{name} {count / sum(counts):.2%}: {part.description}"
        for name, count, part in zip(names, counts, parts, strict=True)
    )
    return Data(
        train=train,
        held_out=(
            HeldOutMixture(names=names, parts=tuple(held_out), counts=counts) if held_out else None
        ),
        tokenizer=parts[0].tokenizer,
        description=f"mixture of {len(parts)} sources by examples: {shares}",
        identity={
            "tokens": sum(int(part.identity["tokens"]) for part in parts),
            "content": _digest(content),
            "documents": sum(int(part.identity["documents"]) for part in parts),
            "tokenizer": parts[0].identity["tokenizer"],
            "eos": parts[0].identity["eos"],
            "held_out_by": " ".join(str(part.identity["held_out_by"]) for part in parts),
        },
        notes=tuple(dict.fromkeys(notes)),
        labels=parts[0].labels,
    )


def _digest(value: Any) -> str:
    """16 hexadecimal digits for a JSON value. Runs know mixtures and held-out data by those of
    identities, so the order of names in these must not change.
    """
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
