"""Command-line handling shared by the scripts: flags, exit codes, and closed or full output
streams.

A flag with one value may be given once. Underscores and dashes are equivalent. Flags of other
frameworks are accepted as aliases if they mean the same, otherwise the error says what to write
(config/aliases.py). Every mistake is a ConfigError of three lines.
"""

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from optimus_jax.config.advice import advice_for, spelled_like
from optimus_jax.config.aliases import PARAMETERS, alias_of, meant_by_last_part, word
from optimus_jax.config.described import SettingText, described_settings
from optimus_jax.config.presets import PRESETS
from optimus_jax.config.recipes import RECIPES
from optimus_jax.config.request import SHORT_NAMES, Entry, canonical, say
from optimus_jax.config.settings import shown
from optimus_jax.config.suggestions import known_settings
from optimus_jax.errors import ConfigError, OptimusError, closest, explain, nearest
from optimus_jax.faults.stopping import EXIT_INTERRUPT, EXIT_NO_READER, EXIT_USER_ERROR
from optimus_jax.system.command import typed_command
from optimus_jax.system.environment import replace_unencodable_characters
from optimus_jax.system.resilient_io import (
    ignoring_write_errors,
    open_closed_streams,
    raising_output_errors,
)

LIST = "list"
"""Value of --set that asks for all settings, and of the flags in NAMED for their names."""
SETTINGS = "--settings"
"""Means `--set list`; with a section, such as `--settings optimizer`, those of that, or one
setting."""
PIPED_WIDTH = 160
"""Width of a table, in columns, if the output is not a terminal."""


def _task_names() -> list[str]:
    from optimus_jax.training.tasks import named_tasks  # imports JAX, which no parser needs

    return [name for name, _ in named_tasks()]


NAMED: dict[str, Callable[[], Iterable[str]]] = {
    "model": lambda: PRESETS,
    "recipe": lambda: (f"{name}  {each.source}" for name, each in RECIPES.items()),
    "task": _task_names,
}
"""What a flag can name, a line each."""

SET = "--set"
_FLAG = re.compile(r"--[A-Za-z][^\s=]*")
_FLAG_IN_TEXT = re.compile(r"--[a-z][a-z-]*")


class Parser(argparse.ArgumentParser):
    """The argument parser of a script.

    Args:
      words: flag without its dashes -> its aliases, separated by spaces as in config/aliases.py.
      settings: settings as error messages advise them -> the same as flags of this script.
      note: called with a message for each alias that is used.
      options: options of argparse.ArgumentParser.
    """

    def __init__(
        self,
        *,
        words: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
        note: Callable[[str], None] = say,
        **options: Any,
    ) -> None:
        options.setdefault(
            "formatter_class",
            lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=118),
        )
        options.setdefault("prog", os.path.basename(sys.argv[0]))  # -m would change it
        super().__init__(allow_abbrev=False, **options)
        for name in (None, "store"):
            self.register("action", name, _SingleValue)
        self._words = {
            each: name for name, several in (words or {}).items() for each in several.split()
        }
        self._settings = settings or {}
        self._note = note
        self._typed = ""

    def read(self, arguments: Sequence[str] | None = None) -> dict[str, Any]:
        """Parse the arguments (default: `sys.argv`) into values by flag name.

        Raises:
          ConfigError: a flag is unknown, has two values, or lacks a value.
          SystemExit: --help was given; or `--model list`, `--set list` or --settings, which
            print names.
        """
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        self._typed = " ".join(arguments)
        for action in self._actions:
            if isinstance(action, _SingleValue):
                action.value = None
        given = vars(self.parse_args(self._translated(arguments)))
        for flag, names in NAMED.items():
            if given.get(flag) == LIST:
                print(*names(), sep="\n")
                raise SystemExit(0)
        for entry in given.get("set") or []:
            if "=" not in entry and (found := settings_in(entry)):
                print(*map(setting_text, found), sep="\n")
                raise SystemExit(0)
        return given

    @contextmanager
    def own_words(self) -> Iterator[None]:
        """Errors raised within advise flags of this script where they advised settings of a run."""
        try:
            yield
        except OptimusError as error:
            text = str(error)
            for setting, flag in self._settings.items():
                text = text.replace(setting, flag)
            if SET not in self.flags():  # what else is advised helps another command
                text = text.replace(f"{SET} ", f"{typed_command('train')} {SET} ")
            error.args = (text, *error.args[1:])
            raise

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError instead of exiting."""
        raise ConfigError(explain(message, given=shown(self._typed) or "nothing", do="see --help"))

    def flags(self) -> list[str]:
        """All flags of this parser."""
        return [
            flag
            for action in self._actions
            for flag in action.option_strings
            if flag.startswith("--")
        ]

    def _translated(self, arguments: list[str]) -> list[str]:
        """The arguments with aliases replaced by this parser's flags.

        Raises ConfigError for unknown flags.
        """
        result: list[str] = []
        unknown: list[tuple[str, str | None]] = []
        others, index = self._given_values(arguments), 0
        is_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        while index < len(arguments):
            given = arguments[index]
            name, equals, value = given.partition("=")
            following = (
                arguments[index + 1]
                if index + 1 < len(arguments) and not arguments[index + 1].startswith("--")
                else None
            )
            index += 1
            # the rest is for another program
            if given == "--" or (is_rest and not given.startswith("-")):
                result += arguments[index - 1 :]
                break
            if not _FLAG.fullmatch(name):
                result.append(given)
                continue
            if name == SETTINGS and SET in self.flags():
                if (asked := value or following) and not settings_in(asked):
                    print(setting_text(_setting_named(asked)))
                    raise SystemExit(0)
                result += [SET, value or following or LIST]
                index += not equals and following is not None
                continue
            own = self._known_flag(name)
            if own is None:
                unknown.append((name, value if equals else following))
            elif own.startswith(f"{SET} "):
                if not equals and following is None:
                    raise ConfigError(
                        explain(f"{name} needs a value", given=name, do=f"write {own}=VALUE")
                    )
                result += [SET, f"{own.removeprefix(SET).strip()}={value if equals else following}"]
                index += not equals
            elif not own.startswith("--"):  # a positional argument
                result += [value] if equals else []
            else:
                result.append(own + equals + value)
                if is_rest and not equals and following is not None and self._takes_one(own):
                    result.append(following)
                    index += 1
        return self._raise_unknown(unknown, others) if unknown else result

    def _known_flag(self, name: str) -> str | None:
        """What a flag means to this parser: one of its flags, `--set section.key`, the name of a
        positional argument, or None if it is unknown.
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
        is_positional = any(
            action.dest == target and not action.option_strings for action in self._actions
        )
        own = (
            target.upper()
            if is_positional
            else target
            if target.startswith(SET)
            else f"--{target.replace('_', '-')}"
        )
        self._note(f"{name} is taken as {own}")
        return own

    def _takes_one(self, flag: str) -> bool:
        return any(
            flag in action.option_strings and action.nargs is None for action in self._actions
        )

    def _given_values(self, arguments: list[str]) -> dict[str, Any]:
        """The given values by normalized flag name; hints for one flag may depend on others."""
        values: dict[str, Any] = {}
        for index, given in enumerate(arguments):
            name, equals, value = given.partition("=")
            if _FLAG.fullmatch(name):
                following = arguments[index + 1] if index + 1 < len(arguments) else ""
                values[word(name)] = (
                    value if equals else "" if following.startswith("--") else following
                )
                if name == SET and not equals:
                    values[word(following.partition("=")[0])] = following.partition("=")[2]
        return values

    def _raise_unknown(
        self, unknown: list[tuple[str, str | None]], others: Mapping[str, Any]
    ) -> NoReturn:
        """Raise ConfigError with a hint for each unknown flag."""
        hints: dict[str, str] = {}
        for name, value in unknown:
            hints.setdefault(self._hint(name, value, others), name)
        do = (
            next(iter(hints))
            if len(hints) == 1
            else "; ".join(f"{name}: {text}" for text, name in hints.items())
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
        # A hint must not mention flags that this script does not have.
        return (
            advice
            if advice is not None and set(_FLAG_IN_TEXT.findall(advice)) <= set(flags)
            else nearest(name, flags)
        )


class _SingleValue(argparse.Action):
    """Stores a flag's value and rejects a second, different one. A flag with several values may be
    repeated; its values are joined.
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


def settings_in(text: str) -> list[SettingText]:
    """All settings, if the text is LIST, or those of the section that it names; otherwise none."""
    return [
        each
        for each in described_settings()
        if text == LIST or each.name.startswith(f"{text.rstrip('.')}.")
    ]


def _setting_named(text: str) -> SettingText:
    """The setting of a name. Raises ConfigError, with the nearest name, if there is none."""
    name = SHORT_NAMES.get(text, text)
    for each in described_settings():
        if each.name == name:
            return each
    sections = dict.fromkeys(name.partition(".")[0] for name in known_settings() if "." in name)
    raise ConfigError(
        explain(
            "there is no such section of settings, nor such a setting",
            given=f"{SETTINGS} {text}",
            do=nearest(text, [*sections, *known_settings()])
            if closest(text, [*sections, *known_settings()])
            else f"choose one of: {', '.join(sections)}",
        )
    )


def setting_text(setting: SettingText) -> str:
    """A setting with its meaning, in lines of the terminal's width."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    meaning = textwrap.wrap(setting.meaning, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([str(setting), *meaning])


def settings(
    given: Mapping[str, Any], *, leave: Iterable[str] = (), note: Callable[[str], None] = say
) -> dict[str, Any]:
    """The run settings in parsed flags and `--set` entries, by dotted name.

    Args:
      given: parsed values by flag name.
      leave: flags that are not settings in this script.
      note: called with a message for each alias of another framework.
    Raises:
      ConfigError: a setting is unknown or has two values.
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
                    do="write --set section.key=value; --set list shows all settings",
                )
            )
        entries.append((name.strip(), value, f"--set {entry}"))
    return canonical(entries, note=note)


def run(main: Callable[[], int | None]) -> int:
    """Run a script's main function and return its exit code: EXIT_USER_ERROR for the user's errors,
    EXIT_NO_READER if the reader of standard output is gone.

    Output to a closed stream is discarded. A stream that cannot be written, as on a full disk, is
    an error of the user.
    """
    open_closed_streams()
    replace_unencodable_characters()
    sys.stdout, sys.stderr = raising_output_errors(sys.stdout), ignoring_write_errors(sys.stderr)
    try:
        try:
            return main() or 0
        finally:
            sys.stdout.flush()
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except BrokenPipeError:  # as with `| head`
        return EXIT_NO_READER
