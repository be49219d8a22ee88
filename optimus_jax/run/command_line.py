"""What the scripts have in common: how flags are read, what becomes of an error, and of streams
that are closed or full.

Flags: one that takes one value is given once; underscores are as good as dashes; words of other
frameworks are taken for ours where they mean the same, and otherwise answered with what to write
(config/aliases.py). Every mistake is a ConfigError of three lines.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from optimus_jax.config.advice import advice_for, spelled_like
from optimus_jax.config.aliases import PARAMETERS, alias_of, meant_by_last_part, word
from optimus_jax.config.request import SHORT_NAMES, Entry, canonical, known_settings, say
from optimus_jax.config.settings import shown
from optimus_jax.errors import ConfigError, OptimusError, closest, explain, nearest
from optimus_jax.system.environment import replace_unencodable_characters
from optimus_jax.system.resilient_io import (
    ignoring_write_errors,
    open_closed_streams,
    raising_output_errors,
)

DONE, MISTAKE, INTERRUPTED, NO_READER = 0, 2, 130, 141
"""Exit codes; the last two are those that a shell has for SIGINT and SIGPIPE."""
SET = "--set"
_NAMED = re.compile(r"--[A-Za-z][^\s=]*")
_MENTIONED = re.compile(r"--[a-z][a-z-]*")


class Parser(argparse.ArgumentParser):
    """Flags of a script.

    Args:
      words: what flags of this script are called elsewhere: a flag without its dashes, to words as
        in config/aliases.py.
      options: of argparse.
    """

    def __init__(self, *, words: Mapping[str, str] | None = None, **options: Any) -> None:
        options.setdefault(
            "formatter_class",
            lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=118),
        )
        options.setdefault("prog", os.path.basename(sys.argv[0]))  # -m would change it
        super().__init__(allow_abbrev=False, **options)
        for name in (None, "store"):
            self.register("action", name, _Once)
        self._words = {
            each: name for name, several in (words or {}).items() for each in several.split()
        }
        self._typed = ""

    def read(self, arguments: Sequence[str] | None = None) -> dict[str, Any]:
        """What was given, by the names of the flags.

        Raises:
          ConfigError: a flag is unknown, is given two values, or lacks its own.
          SystemExit: --help was asked for.
        """
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        self._typed = " ".join(arguments)
        for action in self._actions:
            if isinstance(action, _Once):
                action.value = None
        return vars(self.parse_args(self._in_our_words(arguments)))

    def error(self, message: str) -> NoReturn:
        """As all errors here."""
        raise ConfigError(explain(message, given=shown(self._typed) or "nothing", do="see --help"))

    def flags(self) -> list[str]:
        """Every flag."""
        return [
            flag
            for action in self._actions
            for flag in action.option_strings
            if flag.startswith("--")
        ]

    def _in_our_words(self, arguments: list[str]) -> list[str]:
        """The arguments, each flag as it is called here.

        Raises ConfigError for those that are not known.
        """
        result: list[str] = []
        unknown: list[tuple[str, str | None]] = []
        others, place = self._values(arguments), 0
        is_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        while place < len(arguments):
            given = arguments[place]
            name, equals, value = given.partition("=")
            following = (
                arguments[place + 1]
                if place + 1 < len(arguments) and not arguments[place + 1].startswith("--")
                else None
            )
            place += 1
            # what follows belongs to others
            if given == "--" or (is_rest and not given.startswith("-")):
                result += arguments[place - 1 :]
                break
            if not _NAMED.fullmatch(name):
                result.append(given)
                continue
            own = self._own(name)
            if own is None:
                unknown.append((name, value if equals else following))
            elif own.startswith(f"{SET} "):
                if not equals and following is None:
                    raise ConfigError(
                        explain(f"{name} needs a value", given=name, do=f"write {own}=VALUE")
                    )
                result += [SET, f"{own.removeprefix(SET).strip()}={value if equals else following}"]
                place += not equals
            elif not own.startswith("--"):  # a place in line
                result += [value] if equals else []
            else:
                result.append(own + equals + value)
                if is_rest and not equals and following is not None and self._takes_one(own):
                    result.append(following)
                    place += 1
        return self._refuse(unknown, others) if unknown else result

    def _own(self, name: str) -> str | None:
        """What a flag is called here: the flag, `--set section.key`, the name of an argument that
        stands without a flag, or None.
        """
        flags, plain = self.flags(), "--" + word(name).replace("_", "-")
        for each in (name, plain):
            if each in flags:
                return each
        target = self._words.get(word(name))
        if target is None and (setting := alias_of(name)) is not None:
            short = next(
                (short for short, dotted in SHORT_NAMES.items() if dotted == setting), setting
            )
            target = short if f"--{short.replace('_', '-')}" in flags else None
            if target is None and SET in flags and setting not in PARAMETERS:
                target = f"{SET} {setting}"
        if target is None:
            return None
        is_place = any(
            action.dest == target and not action.option_strings for action in self._actions
        )
        own = (
            target.upper()
            if is_place
            else target
            if target.startswith(SET)
            else f"--{target.replace('_', '-')}"
        )
        say(f"{name} is taken as {own}")
        return own

    def _takes_one(self, flag: str) -> bool:
        return any(
            flag in action.option_strings and action.nargs is None for action in self._actions
        )

    def _values(self, arguments: list[str]) -> dict[str, Any]:
        """What was given, by words: other advice is computed with it."""
        found: dict[str, Any] = {}
        for place, given in enumerate(arguments):
            name, equals, value = given.partition("=")
            if _NAMED.fullmatch(name):
                following = arguments[place + 1] if place + 1 < len(arguments) else ""
                found[word(name)] = (
                    value if equals else "" if following.startswith("--") else following
                )
                if name == SET and not equals:
                    found[word(following.partition("=")[0])] = following.partition("=")[2]
        return found

    def _refuse(self, unknown: list[tuple[str, str | None]], others: Mapping[str, Any]) -> NoReturn:
        """Raise ConfigError with what to write instead of all that is not known."""
        told: dict[str, str] = {}
        for name, value in unknown:
            told.setdefault(self._hint(name, value, others), name)
        do = (
            next(iter(told))
            if len(told) == 1
            else "; ".join(f"{name}: {text}" for text, name in told.items())
        )
        given = " ".join(name if value is None else f"{name} {value}" for name, value in unknown)
        raise ConfigError(explain(f"unknown argument {unknown[0][0]!r}", given=shown(given), do=do))

    def _hint(self, name: str, value: str | None, others: Mapping[str, Any]) -> str:
        flags = self.flags()
        advice = advice_for(name, value, others)
        if advice is None and (meant := meant_by_last_part(name)) is not None:
            short = next((short for short, dotted in SHORT_NAMES.items() if dotted == meant), meant)
            own = f"--{short.replace('_', '-')}"
            advice = f"did you mean {own if own in flags else f'{SET} {meant}'}={value or 'VALUE'}?"
        if (
            advice is None
            and SET in flags
            and closest(name, flags) is None
            and (setting := closest(name.lstrip("-"), known_settings())) is not None
        ):
            return f"did you mean {SET} {setting}={value or 'VALUE'}?"
        advice = advice or spelled_like(name, flags, value, others)
        # A hint is of no use if it speaks of flags that this script does not have.
        return (
            advice
            if advice is not None and set(_MENTIONED.findall(advice)) <= set(flags)
            else nearest(name, flags)
        )


class _Once(argparse.Action):
    """A flag with one value, which may be given twice if it is the same; one that takes several
    values takes those of both.
    """

    value: Any = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.nargs in ("+", "*") and self.option_strings:
            values = [*(self.value or ()), *values]
        elif self.value is not None and self.value != values:
            raise ConfigError(
                explain(
                    f"{option_string} is given two values",
                    given=f"{option_string} {self.value} and {option_string} {values}",
                    do="give it once",
                )
            )
        self.value = values
        setattr(namespace, self.dest, values)


def settings(
    given: Mapping[str, Any], *, leave: Iterable[str] = (), note: Callable[[str], None] = say
) -> dict[str, Any]:
    """The settings of a run in parsed flags and their `--set` entries, by dotted names.

    Args:
      leave: flags that are no settings in this script.
      note: is told what a word of another framework is taken as.
    Raises:
      ConfigError: one is unknown, or given two values.
    """
    entries: list[Entry] = [
        (
            name,
            value,
            (
                f"--{name.replace('_', '-')}"
                f" {' '.join(map(str, value)) if isinstance(value, list) else value}"
            ),
        )
        for name, value in given.items()
        if name in SHORT_NAMES and name not in leave and value is not None
    ]
    for entry in given.get("set") or []:
        name, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError(
                explain(
                    "--set needs a name and a value",
                    given=entry,
                    do="write --set section.key=value",
                )
            )
        entries.append((name.strip(), value, f"--set {entry}"))
    return canonical(entries, note=note)


def run(main: Callable[[], int | None]) -> int:
    """The exit code of a script whose result is what it prints or writes: MISTAKE for the user's
    errors, NO_READER where nobody reads on.

    A stream that is closed leads nowhere. One that takes nothing more, such as a full disk's, is
    the user's error.
    """
    open_closed_streams()
    replace_unencodable_characters()
    sys.stdout, sys.stderr = raising_output_errors(sys.stdout), ignoring_write_errors(sys.stderr)
    try:
        try:
            return main() or DONE
        finally:
            sys.stdout.flush()
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # as of `| head`: who reads has enough
        return NO_READER
