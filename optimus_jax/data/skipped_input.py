"""Counts the input that was skipped while reading a data set; reported when a run starts."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_NAMED = 3
"""Most files that a note names one by one."""


@dataclass(kw_only=True)
class SkippedInput:
    """Counts that grow while sources are expanded and read."""

    bad_lines: dict[Path, list[int]] = field(default_factory=dict)
    """Per file, the numbers of the bad lines, rows or items skipped with data.skip_bad_lines."""
    empty_files: list[Path] = field(default_factory=list)
    """Files of a glob or folder that hold no text."""
    other_files: Counter[str] = field(default_factory=Counter)
    """Per suffix, the number of files in folders whose format cannot be trained on."""

    without_end: list[Path] = field(default_factory=list)
    """Arrow streams without an end marker, which may have been cut short."""

    repeated: list[Path] = field(default_factory=list)
    """Files that are given more than once, and are read that many times."""

    @property
    def num_bad_lines(self) -> int:
        """Number of lines, rows and items skipped, over all files."""
        return sum(map(len, self.bad_lines.values()))

    def notes(self) -> list[str]:
        """One sentence for each kind of skipped input."""
        found = []
        if self.bad_lines:
            where = [
                f"{len(numbers):,} in {path} (the first is {numbers[0]:,})"
                for path, numbers in self.bad_lines.items()
            ]
            found.append(
                f"data.skip_bad_lines: {self.num_bad_lines:,} bad line(s) skipped: {_some(where)}"
            )
        if self.empty_files:
            found.append(
                f"{len(self.empty_files):,} empty file(s) left out: "
                + _some(list(map(str, self.empty_files)))
            )
        if self.other_files:
            kinds = ", ".join(
                f"{count:,} {suffix or 'without a suffix'}"
                for suffix, count in sorted(self.other_files.items())
            )
            found.append(
                f"file(s) in folders left out, because their format is not supported: {kinds}"
            )
        if self.repeated:
            found.append(
                f"{len(self.repeated):,} file(s) are given more than once, and read as often: "
                + _some(list(map(str, self.repeated)))
            )
        if self.without_end:
            found.append(
                f"{len(self.without_end):,} Arrow stream(s) have no end-of-stream marker, "
                "which a writer may leave out; but if they were cut short, rows are missing: "
                + _some(list(map(str, self.without_end)))
            )
        return found


def _some(words: list[str]) -> str:
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")
