"""What a run keeps of its data: its tokenizer, how it held out, and what its data is known by.

Data is known by its content (data/dataset.py), so files may be moved, renamed or compressed while a
run is away.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optimus_jax.config import Config, DataConfig
from optimus_jax.data.dataset import Data, differences
from optimus_jax.data.eos import CONFIG
from optimus_jax.data.formats import TOKEN_SUFFIX
from optimus_jax.data.tokenizers import Tokenizer, load_tokenizer
from optimus_jax.data.tokens import HeldOutBy
from optimus_jax.errors import DataError, RunDirectoryError, explain
from optimus_jax.run_directory.directory import RunDirectory

NOT_COMPARABLE = "held-out losses from before and from here on cannot be compared"
"""What to say where evaluations read other tokens than they did."""
_START_EVENTS = ("start", "resume")


def tokenizer_of_run(run: RunDirectory, config: DataConfig) -> Tokenizer:
    """The tokenizer of a run that goes on: its own copy, else the file that the config names.

    Args:
      config: of the run as it goes on.
    Raises:
      DataError: it cannot be used, or another one is named than the run has.
    """
    if run.tokenizer is None:
        # Before runs kept theirs, what ends a document was found by the list alone.
        try:
            is_old_run = identity_in_run(run) is None
        except RunDirectoryError:  # the checkpoint knows the tokenizer as well (check_tokenizer)
            is_old_run = False
        return load_tokenizer(config.tokenizer, config.eos, by_list=is_old_run)
    own = load_tokenizer(str(run.tokenizer), config.eos)
    if (eos := (identity_in_run(run) or {}).get("eos")) is not None and own.eos != eos:
        raise _other_eos(f"it is {own.end}; the run was begun with id {eos}", run.path)
    if config.tokenizer != (begun := Config.from_json(run.config_text()).data.tokenizer):
        other = load_tokenizer(config.tokenizer, by_list=True)
        if other.digest != own.digest:
            raise _other_tokenizer(
                f"{config.tokenizer} has digest {other.digest}; "
                f"the run was begun with {begun}, digest {own.digest}"
            )
    return own


def check_tokenizer(tokenizer: Tokenizer, run: RunDirectory, metadata: Mapping[str, Any]) -> None:
    """Raise DataError if a tokenizer is not the one that the tokens of a checkpoint were made with.

    Nor may documents end with another token than they did.

    Args:
      metadata: of the checkpoint.
    """
    data = metadata.get("data") or {}
    digest, eos = data.get("tokenizer"), data.get("eos")
    if digest is not None and tokenizer.digest != digest:
        raise DataError(
            explain(
                "the tokenizer is not the one that this run was trained with",
                given=f"digest {tokenizer.digest}; the checkpoint says {digest}",
                do=f"bring the file back, to where it was or as {run.path / 'tokenizer.json'}",
            )
        )
    if eos is not None and tokenizer.eos != eos:
        raise _other_eos(f"it is {tokenizer.end}; the checkpoint says id {eos}", run.path)


def held_out_in_run(run: RunDirectory) -> HeldOutBy:
    """How a run has chosen the tokens that it holds out.

    It goes on to do so, whatever kind of file the texts are in now.
    """
    if (by := (_start_identity(run, last=False) or {}).get("held_out_by")) in ("documents", "end"):
        return by
    # Begun before this was put down: token files alone, and one only, were cut at the end.
    sources = Config.from_json(run.config_text()).data.sources
    return "end" if len(sources) == 1 and sources[0].endswith(TOKEN_SUFFIX) else "documents"


def identity_in_run(run: RunDirectory) -> dict[str, Any] | None:
    """What the run's data was known by when it was last begun or resumed; None: nothing says so."""
    return _start_identity(run, last=True)


def _start_identity(run: RunDirectory, *, last: bool) -> dict[str, Any] | None:
    found = [
        event["identity"]
        for event in run.events()
        if event.get("event") in _START_EVENTS and isinstance(event.get("identity"), dict)
    ]
    return found[-1 if last else 0] if found else None


def check_same_data(
    before: Mapping[str, Any] | None, data: Data, config: DataConfig, tell: Callable[[str], object]
) -> None:
    """Raise DataError if a run had other data: its step k would then be another batch.

    Args:
      before: what its data was known by; None: unknown.
      tell: told what has changed where that is allowed.
    """
    if before is None or not (names := differences(before, data.identity)):
        return
    changed = ", ".join(f"{name} was {before[name]} and is {data.identity[name]}" for name in names)
    if "tokenizer" in names:
        raise _other_tokenizer(f"{data.train.name}: {changed}")
    if "eos" in names:
        raise _other_eos(
            f"{data.train.name}: it is {data.tokenizer.end}; it was id {before['eos']}"
        )
    if not config.allow_change:
        hint = (
            ""
            if {"tokens", "documents"} & set(names)
            else " (as many tokens and documents: files in another order, or some text has changed)"
        )
        raise DataError(
            explain(
                "the data is not what this run was trained on",
                given=f"{data.train.name}: {changed}{hint}",
                do="bring back the data, its files in the same order; "
                "or go on with the new: --set data.allow_change=true",
            )
        )
    tell(f"the data has changed, which data.allow_change allows: {changed}; {NOT_COMPARABLE}")


def _other_eos(given: str, run: Path | None = None) -> DataError:
    where = "its tokenizer_config.json" if run is None else run / CONFIG
    return DataError(
        explain(
            "a run keeps its tokenizer, and with it the token that ends a document (eos)",
            given=given,
            do=f"leave data.eos out and bring back {where}, whose eos_token names it; "
            "or start a new run with another --run-dir",
        )
    )


def _other_tokenizer(given: str) -> DataError:
    return DataError(
        explain(
            "a run keeps its tokenizer, by which its token ids mean what they mean",
            given=given,
            do="leave --tokenizer out, or start a new run with another --run-dir",
        )
    )
