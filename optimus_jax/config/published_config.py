"""Tells config files of published models and adapters from those of runs."""

from collections.abc import Mapping
from typing import Literal

PublishedKind = Literal["model", "adapters"]
WHAT: Mapping[PublishedKind, str] = {
    "model": "a published model (Hugging Face)",
    "adapters": "published adapters (PEFT)",
}
"""Kinds, in words."""
_KEYS: Mapping[PublishedKind, frozenset[str]] = {
    "adapters": frozenset({"peft_type"}),
    "model": frozenset({"model_type", "architectures"}),
}
"""Keys of which such a config has at least one, and the config of a run has none."""


def published_kind(value: object) -> PublishedKind | None:
    """Of what published the JSON value is the config; None: of nothing known."""
    if not isinstance(value, Mapping):
        return None
    return next((kind for kind, keys in _KEYS.items() if keys & value.keys()), None)
