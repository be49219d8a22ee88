"""Files of models on the Hugging Face hub, through huggingface_hub and its cache.

The library's own variables hold: HF_HOME (the cache), HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT.
"""

from collections.abc import Sequence
from pathlib import Path

from optimus_jax.errors import StoreError, explain, first_line
from optimus_jax.system.hub_model import HubModel

TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""Files of a model's tokenizer that are read, if they are there."""


_COMMITS: dict[tuple[str, HubModel], str] = {}
"""The commit that this process reads of a model, by cache and model."""


def hub_directory(model: HubModel, files: Sequence[str], *, cached: bool = False) -> Path:
    """A local directory with those files of a model that the hub has. All that a process reads of a
    model is of one commit, though a branch may move.

    Files that the cache has are not fetched again. Processes of a host that call this at the same
    time fetch each file once.

    Args:
      files: names, or patterns of names.
      cached: whether to fetch nothing, and use what is in the cache.
    Raises:
      StoreError: there is no such model, it may not be read, or it is neither in the cache nor can
        it be fetched.
    """
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise StoreError(
            explain(
                "models on the hub need huggingface_hub, which is not installed",
                given=model,
                do="pip install 'optimus-jax[hub]', or give the directory of a model",
            )
        ) from error
    key = str(constants.HF_HUB_CACHE), model
    revision = _COMMITS.get(key, model.revision)
    try:
        directory = Path(
            snapshot_download(
                model.repository,
                revision=revision,
                allow_patterns=list(files),
                local_files_only=cached,
            )
        )
        _COMMITS[key] = commit_of(directory)
        return directory
    except errors.GatedRepoError as error:
        wrong, do = "may be read only by users whom its owner has admitted", "ask on its page"
        raise _unavailable(model, wrong, f"{do}, and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise _unavailable(
            model,
            "is not on the hub, or is private",
            "check its name (a directory of that name does not exist either); for a private model,"
            " set HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise _unavailable(model, "has no such revision", "name a branch, tag or commit") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _unavailable(
            model,
            "is not in the cache, and "
            + (
                "nothing is fetched for this"
                if cached
                else "HF_HUB_OFFLINE is set"
                if constants.HF_HUB_OFFLINE
                else "the hub cannot be reached"
            ),
            "fetch it where there is a network, or give the directory of a model",
        ) from error
    except Exception as error:  # of the library, its HTTP client, or the file system
        raise _unavailable(
            model,
            f"cannot be fetched: {type(error).__name__}: {first_line(error)[:300]}",
            "try again, or give the directory of a model",
        ) from error


def commit_of(directory: Path) -> str:
    """The commit whose files `hub_directory` returned: the name of its directory."""
    return directory.name


def _unavailable(model: HubModel, what: str, do: str) -> StoreError:
    return StoreError(explain(f"this model {what}", given=model, do=do))
