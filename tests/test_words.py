"""The field's words: private ones that were replaced do not come back."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REPLACED = {
    "again none": "still none",
    "catalogue": "hardware database",
    "chair": "coordinator",
    "check alike": "assert_same_everywhere",
    "council": "broadcast",
    "dealt": "assigned",
    "distrusted": "less certain",
    "foretelling": "prediction",
    "foretold": "predicted",
    "last words": "flush_with_timeout",
    "meeting": "rendezvous",
    "of first process": "broadcast_from_0",
    "patient stream": "resilient_io",
    "roll call": "rendezvous server",
    "rung": "switch method",
    "signs of life": "heartbeat",
}
"""Private word or phrase -> the one to use. Parts of identifiers count as words."""
REPLACED_NAMES = {
    "between": "inter_host",
    "hear": "receive",
    "heard": "received",
    "here": "LocalCluster",
    "inside": "intra_host",
    "kept": "cache",
    "moves": "suggestions",
    "neighbours": "suggestions",
    "order": "command",
    "recomputing_more": "memory_fallbacks",
    "reporting": "rendezvous client",
    "rings": "activation buffers",
    "setting_changes": "suggestions",
    "style": "implementation",
    "together": "all_or_none",
}
"""Ordinary words that are no names of modules, classes, functions, parameters or fields. Local
variables may have them."""
STILL_READ = {
    ("optimus_jax/report/run_events.py", "rung"),  # a field of events of older versions
}
STILL_NAMED = {
    ("benchmarks/disturbance.py", "moves"),  # moves of the state
    ("benchmarks/switch_cost.py", "moves"),
    ("docs/site/generate.py", "here"),  # the page that has a link
    ("optimus_jax/data/loader.py", "order"),  # of examples, operations, leaves and devices
    ("optimus_jax/planning/ahead_of_time/hlo.py", "order"),
    ("optimus_jax/reshard/reshard.py", "order"),
    ("tests/reshard/test_restack.py", "order"),
    ("benchmarks/regret.py", "order"),
    ("optimus_jax/report/page.py", "style"),  # of a page
    ("optimus_jax/report/charts.py", "style"),
}
"""Names with another meaning than the private one."""
PATTERNS = (
    "*.md",
    "*.toml",
    "Makefile",
    "benchmarks/**/*.json",
    "benchmarks/**/*.md",
    "benchmarks/**/*.py",
    "deploy/*",
    "docs/**/*.md",
    "docs/**/*.py",
    "notebooks/*.ipynb",
    "optimus_jax/**/*.json",
    "optimus_jax/**/*.py",
    "optimus_jax/**/*.toml",
    "scripts/*.py",
    "tests/**/*.py",
)
FILES = [
    path
    for pattern in PATTERNS
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md" and path != Path(__file__)
]
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[.:;]")
"""A word or a part of an identifier, or the end of a sentence, which ends a phrase."""
_PHRASE = re.compile(rf"\b(?:{'|'.join(REPLACED)})\b")


def found_in(text: str) -> set[str]:
    """The replaced words and phrases in a text, also as parts of identifiers."""
    return set(_PHRASE.findall(" ".join(_WORD.findall(text)).lower()))


def defined_names(source: str) -> Iterator[str]:
    """Names of the classes, functions, parameters, attributes and fields of a module, without
    leading underscores.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.arg(arg=name)
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.AnnAssign(target=ast.Name(id=name), simple=1)
            ):
                yield name.lstrip("_").lower()


def place_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_replaced_words_do_not_come_back():
    found = {
        (place_of(path), word)
        for path in FILES
        for word in found_in(f"{path.stem} {path.read_text(encoding='utf-8')}")
    }
    assert found == STILL_READ


def test_replaced_names_do_not_come_back():
    modules = [path for path in FILES if path.suffix == ".py"]
    found = {
        (place_of(path), name)
        for path in modules
        for name in [path.stem, *defined_names(path.read_text(encoding="utf-8"))]
        if name in REPLACED_NAMES
    }
    assert found == STILL_NAMED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Chair is dealt; self.last_words()", {"chair", "dealt", "last words"}),
        ("RollCall, a roll-call or ROLL_CALLS", {"roll call"}),
        ("import coordinator as chair_module", {"chair"}),
        ("after that again\n  none was found", {"again none"}),
        ("a chairlift, wrung; wait again. None: it was not found", set()),
    ],
)
def test_words_are_found_in_identifiers_and_sentences(text, words):
    assert found_in(text) == words


def test_names_are_those_that_a_module_defines():
    source = """
class Here:
    kept: int
    def heard(self, inside):
        self._between = inside
        together = 1
"""
    assert set(defined_names(source)) == {"here", "kept", "heard", "self", "inside", "between"}
