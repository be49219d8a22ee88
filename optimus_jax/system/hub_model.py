"""A model on the Hugging Face hub, as the user names it: `hf://ORG/NAME`, or that with @REVISION.

Where a path is unlikely, ORG/NAME is accepted too. It is still a path if a file or directory ORG
exists.
"""

import os
import re
from dataclasses import dataclass

from optimus_jax.errors import explain
from optimus_jax.system.paths import PathError, UserPath

HUB = "hf://"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_MODEL = re.compile(rf"(?P<repository>(?:{_NAME}/)?{_NAME})(?:@(?P<revision>[A-Za-z0-9._/-]+))?")
_FILE = re.compile(r".*\.(json|jinja|model|txt|bin|safetensors)")
"""Names of a file, which no model has."""


@dataclass(frozen=True)
class HubModel:
    """A model on the hub."""

    repository: str
    """ORG/NAME; the oldest models have a NAME alone."""
    revision: str | None = None
    """Branch, tag or commit; None: the branch `main`."""

    @classmethod
    def parse(cls, text: UserPath, *, bare: bool = False) -> "HubModel | None":
        """The model that a text names; None: it names something else, such as a path.

        Args:
          bare: whether ORG/NAME is accepted.
        Raises:
          PathError: it is a `hf://` URL, and not that of a model.
        """
        text = os.fspath(text)
        if not isinstance(text, str):
            return None
        is_url = text.startswith(HUB)
        match = _MODEL.fullmatch(text.removeprefix(HUB))
        if match is None or _FILE.fullmatch(match["repository"]):
            if is_url:
                raise PathError(
                    explain(
                        "this is not the URL of a model on the Hugging Face hub",
                        given=text,
                        do=f"write {HUB}ORG/NAME, or {HUB}ORG/NAME@REVISION",
                    )
                )
            return None
        organisation, slash, _ = match["repository"].partition("/")
        if is_url or (bare and slash and not os.path.lexists(organisation)):
            return cls(match["repository"], match["revision"])
        return None

    def __str__(self) -> str:
        return f"{HUB}{self.repository}" + ("" if self.revision is None else f"@{self.revision}")
