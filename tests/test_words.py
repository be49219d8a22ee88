"""The field's words: private ones that were replaced do not come back."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPLACED = {
    "chair": "coordinator",
    "council": "rendezvous",
    "roll_call": "rendezvous server",
    "patient_stream": "resilient_io",
    "last_words": "flush_with_timeout",
    "signs_of_life": "heartbeat",
    "check_alike": "assert_same_everywhere",
    "of_first_process": "broadcast_from_0",
    "foretold": "predicted",
    "foretelling": "prediction",
    "recomputing_more": "memory_fallbacks",
    "setting_changes": "suggestions",
    "catalogue": "hardware database",
    "dealt": "assigned",
    "rung": "switch_method",
    "distrusted": "less certain",
}
"""Private word -> the one to use."""
STILL_READ = {("optimus_jax/report/run_events.py", "rung")}
"""Events of older versions have this field."""
FILES = [
    path
    for pattern in ("optimus_jax/**/*.py", "scripts/*.py", "docs/*.md", "docs/*/*.md", "*.md")
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md"
]


def found_in(text: str) -> set[str]:
    """The replaced words in a text, also as parts of sentences."""
    words = set(re.findall(r"[a-z_]+", text.lower().replace("-", "_")))
    return words & REPLACED.keys()


def test_replaced_words_do_not_come_back():
    found = {
        (str(path.relative_to(ROOT)), word)
        for path in FILES
        for word in found_in(path.read_text(encoding="utf-8"))
    }
    assert found == STILL_READ


def test_words_are_found_in_names_and_sentences():
    assert found_in("The Chair is dealt; self.last_words()") == {"chair", "dealt", "last_words"}
    assert not found_in("a chairlift")
