"""Checks on resume that a run has the same data: its tokenizer, its held-out split, and the
identity of its data.

Data is identified by content (data/identity.py), so files may be moved, renamed or compressed
between two starts of a run.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optimus_jax.config import Config, DataConfig
from optimus_jax.data.chat_template import TEMPLATE_FILE, template_file
from optimus_jax.data.dataset import RULES, Data
from optimus_jax.data.eos import CONFIG
from optimus_jax.data.formats import TOKEN_SUFFIX
from optimus_jax.data.identity import HELD_OUT_CONTENT, differences
from optimus_jax.data.iterated import MAKE_NEW, IteratedExamples
from optimus_jax.data.tokenizers import Tokenizer, load_tokenizer
from optimus_jax.errors import DataError, RunDirectoryError, explain
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.store.local_copies import local_file

NOT_COMPARABLE = "held-out losses from before and from here on cannot be compared"
"""Warning if evaluations read other tokens than before."""
_START_EVENTS = ("start", "resume")


def tokenizer_of_run(run: RunDirectory, config: DataConfig) -> Tokenizer:
    """The tokenizer of a resumed run: its own copy, else the file that the config names.

    Args:
      config: data settings of the resumed run.
    Raises:
      DataError: it cannot be used, or the config names another tokenizer than the run's.
    """
    if run.tokenizer is None:
        # Before runs kept their tokenizer, the eos token was found by the list of known names
        # alone.
        try:
            is_old_run = identity_in_run(run) is None
        except RunDirectoryError:  # the checkpoint knows the tokenizer as well (check_tokenizer)
            is_old_run = False
        copy = run.path / TEMPLATE_FILE
        has_copy = copy.is_file()
        of_bytes = load_tokenizer(
            config.tokenizer,
            config.eos,
            by_list=is_old_run,
            chat_template=str(copy) if has_copy else config.chat_template,
        )
        if has_copy:
            _check_template(run, config, of_bytes)
        return of_bytes
    own = load_tokenizer(str(run.tokenizer), config.eos)
    if (eos := (identity_in_run(run) or {}).get("eos")) is not None and own.eos != eos:
        raise _other_eos(f"it is {own.end}; the run began with id {eos}", run.path)
    if config.tokenizer != (begun := Config.from_json(run.config_text()).data.tokenizer):
        other = load_tokenizer(config.tokenizer, by_list=True)
        if other.digest != own.digest:
            raise _other_tokenizer(
                f"{config.tokenizer} has digest {other.digest}; "
                f"the run began with {begun}, digest {own.digest}"
            )
    _check_template(run, config, own)
    return own


def _check_template(run: RunDirectory, config: DataConfig, own: Tokenizer) -> None:
    """Raise DataError if a resume names another chat template than the run's own copy."""
    begun, asked = Config.from_json(run.config_text()).data.chat_template, config.chat_template
    if asked in (None, begun):
        return
    text = template_file(local_file(asked, what="data.chat_template"), {}).text
    if own.chat_template is not None and text != own.chat_template.text:
        raise DataError(
            explain(
                "a run keeps its chat template: another one would make other tokens",
                given=f"{asked} differs from {run.path / TEMPLATE_FILE}",
                do="leave data.chat_template out, or start a new run with another --run-dir",
            )
        )


def check_tokenizer(tokenizer: Tokenizer, run: RunDirectory, metadata: Mapping[str, Any]) -> None:
    """Raise DataError if a checkpoint was trained with another tokenizer or another eos token.

    Args:
      metadata: metadata of the checkpoint.
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


def held_out_in_run(run: RunDirectory) -> str:
    """How a run chooses its held-out tokens; kept on resume, whatever the file format is now.

    One of HeldOutBy, or of a mixture one for each source.
    """
    by = (_start_identity(run, last=False) or {}).get("held_out_by")
    if isinstance(by, str) and by and set(by.split()) <= {*RULES}:
        return by
    # The run began before this was recorded: then a single token file was split at the end.
    sources = Config.from_json(run.config_text()).data.sources
    return "end" if len(sources) == 1 and sources[0].endswith(TOKEN_SUFFIX) else "documents"


def identity_in_run(run: RunDirectory) -> dict[str, Any] | None:
    """Identity of the data at the last start or resume; None: not recorded."""
    return _start_identity(run, last=True)


def weights_in_run(run: RunDirectory) -> str | None:
    """Where the first start of a run found its parameters; None: not recorded."""
    starts = (event for event in run.events() if event.get("event") == "start")
    weights = next(starts, {}).get("weights")
    return weights if isinstance(weights, str) else None


def _start_identity(run: RunDirectory, *, last: bool) -> dict[str, Any] | None:
    found = [
        event["identity"]
        for event in run.events()
        if event.get("event") in _START_EVENTS and isinstance(event.get("identity"), dict)
    ]
    return found[-1 if last else 0] if found else None


def check_same_share(config: Config, run: RunDirectory) -> None:
    """Raise DataError if a resumed run would hold out another share of its data, because it has
    data to evaluate on of its own, or no longer: step k would then be another batch.
    """
    begun = Config.from_json(run.config_text())
    before, now = (
        0.0 if bool(each.evaluation.data) else each.data.eval_fraction for each in (begun, config)
    )
    if config.data.allow_change or bool(begun.evaluation.data) == bool(config.evaluation.data):
        return
    if before != now:
        raise DataError(
            explain(
                "a run keeps the share of its data that is held out, which --eval-data replaces",
                given=f"evaluation.data={','.join(config.evaluation.data) or 'none'}, so that"
                f" {now:.3g} of the data is held out; it was {before:.3g}",
                do="measure other data with `evaluate.py --run`, or train on other examples from"
                " here on: --set data.allow_change=true"
                if config.evaluation.data
                else "name --eval-data again, or train on other examples from here on: --set"
                " data.allow_change=true",
            )
        )


def check_same_data(
    before: Mapping[str, Any] | None, data: Data, config: DataConfig, tell: Callable[[str], object]
) -> None:
    """Raise DataError if the data differs from the run's: step k would then be another batch.

    Args:
      before: identity of the run's data; None: unknown.
      tell: called with the changes if they are allowed.
    """
    if before is None or not (names := differences(before, data.identity)):
        return
    changed = ", ".join(f"{name} was {before[name]} and is {data.identity[name]}" for name in names)
    if names == [HELD_OUT_CONTENT]:
        tell(f"the data to evaluate on has changed: {changed}; {NOT_COMPARABLE}")
        return
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
            else " (as many tokens and documents: files in another order, other weights, or some"
            " text has changed)"
        )
        raise DataError(
            explain(
                "the data is not what this run was trained on",
                given=f"{data.train.name}: {changed}{hint}",
                do=(
                    f"bring back the data, from its beginning: {MAKE_NEW}"
                    if isinstance(data.train, IteratedExamples)
                    else "bring back the data, its files in the same order"
                )
                + "; or train on the new data: --set data.allow_change=true",
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
            "a run keeps its tokenizer: with another one its token ids would mean other text",
            given=given,
            do="leave --tokenizer out, or start a new run with another --run-dir",
        )
    )
