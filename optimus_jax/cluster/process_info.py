"""What a launcher says about this process, read from the environment variables that it sets
(launchers.py lists them).
"""

import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optimus_jax.errors import ConfigError, explain

COORDINATOR, NUM_PROCESSES, PROCESS_ID = VARIABLES = (
    "OPTIMUS_COORDINATOR",
    "OPTIMUS_NUM_PROCESSES",
    "OPTIMUS_PROCESS_ID",
)
"""Environment variables with the meaning of --coordinator, --num-processes and --process-id."""
DESCRIPTION = "description"
"""Key of a derived text for messages: which step and nodes of a job the process belongs to."""
FIRST_PORT, NUM_PORTS = 61440, 4096
"""Range of derived ports: above the system's ephemeral ports; JAX uses the same range."""
MAX_DIGITS = 6
"""Digits of the largest number of processes that is accepted."""
NOT_DISTRIBUTED = "-1"
"""Rank that PyTorch scripts use when nothing is distributed."""

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One launcher: the environment variables that it sets, and how to read them.

    If a field lists several variables, the first one that is set is used; an empty one is unset.
    """

    name: str
    count: tuple[str, ...] = ()
    """Number of processes of the run."""
    index: tuple[str, ...] = ()
    """Index of this process, from 0."""
    address: tuple[str, ...] = ()
    """HOST or HOST:PORT of process 0; empty: the launcher does not provide it, and a run on one
    host uses localhost."""
    port: tuple[str, ...] = ()
    """Port that process 0 listens on; empty: it is derived from `job` or the address, which gives
    the same port in all processes."""
    local_count: tuple[str, ...] = ()
    """Processes of the run on this host."""
    local_index: tuple[str, ...] = ()
    """Index of this process on its host, from 0."""
    job: tuple[str, ...] = ()
    """Identifier shared by all processes of this start of the run and by no others."""
    needs: tuple[str, ...] = ()
    """The row applies only if all of these are set."""
    unless: tuple[str, ...] = ()
    """The row applies only if none of these is set."""
    min_fields: int = 1
    """The row applies only if at least this many of count, index and address are set: 2 if the
    names are common words."""
    restarts: bool = False
    """Whether it restarts jobs after a fault (exit code 75) but not after a user's error (2)."""
    is_explicit: bool = False
    """Whether these are our own variables: they override all launchers, and must be complete."""
    is_exported: bool = False
    """Whether people also export these variables by hand: then an index of 0 alone means nothing,
    and a contradiction with an outer launcher is an error."""
    is_hint: bool = False
    """Whether the variables are shared by several launchers and only show that other processes
    exist: of several in a field, the largest number is used."""
    has_one_parent: bool = False
    """Whether one process of the launcher starts all of the run's processes on a host."""
    num_agents: tuple[str, ...] = ()
    """Number of its agents, if an outer launcher starts them; the two numbers must match."""
    gives_gpus: Callable[[Environment], bool] = lambda environment: False
    """Whether each process sees only its own GPUs."""
    derive: Callable[[Environment], Environment] = lambda environment: {}
    """Turns lists and JSON in variables into plain values. Raises ValueError if they cannot be
    parsed."""

    def read(self, environment: Environment) -> "ProcessInfo | None":
        """What the launcher says about this process; None: it did not start this process.

        Raises:
          ConfigError: a variable cannot be parsed, or the numbers contradict one another.
        """
        if any(not _first_set(environment, (name,)) for name in self.needs) or _first_set(
            environment, self.unless
        ):
            return None
        try:
            values = {**environment, **self.derive(environment)}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            names = _set_variables(
                (*self.needs, *self.index, *self.count, *self.address, *self.port), environment
            )
            raise ConfigError(
                explain(
                    f"the variables that {self.name} has set for this process cannot be read",
                    given=f"{assignments(names)}: {error}",
                    do=f"fix or unset {' and '.join(names)}, or {EXPLICIT_SETUP_HINT}",
                )
            ) from error
        if self.is_exported:
            values = self._without_minus_one(values)
        fields = [self.count, self.index]
        if self.is_explicit or self.min_fields > 1:
            fields.append(self.address)
        if self.is_hint:
            fields += [self.local_count, self.local_index]
        if sum(_first_set(values, field) is not None for field in fields) < self.min_fields:
            return None
        numbers = (self.count, self.index, self.local_count, self.local_index)
        variables = dict(found for field in numbers if (found := self._pick(values, field)))
        address_names = [
            found[0] for field in (self.address, self.port) if (found := _first_set(values, field))
        ]
        info = ProcessInfo(
            launcher=self,
            variables=_set_variables(variables, environment),
            address_variables=_set_variables(address_names, environment),
            count=self._number(values, self.count),
            index=self._number(values, self.index),
            address=_value(values, self.address),
            port=_value(values, self.port),
            local_count=self._number(values, self.local_count),
            local_index=self._number(values, self.local_index),
            num_agents=self._number(values, self.num_agents),
            description=values.get(DESCRIPTION) or f" ({assignments(variables)})",
            job=_value(values, self.job) or "",
        )
        info.check()
        return info

    def _without_minus_one(self, values: Environment) -> Environment:
        """The values without ranks of -1 ("not distributed"), unless a count says that there are
        several processes.
        """
        if any(
            value not in (NOT_DISTRIBUTED, "1")
            for names in (self.count, self.local_count)
            for name in names
            if (value := _value(values, (name,)))
        ):
            return values
        numbers = {*self.count, *self.index, *self.local_count, *self.local_index}
        return {
            name: value
            for name, value in values.items()
            if name not in numbers or value.strip() != NOT_DISTRIBUTED
        }

    def _number(self, values: Environment, names: Sequence[str]) -> int | None:
        if (found := self._pick(values, names)) is None:
            return None
        name, text = found
        if not _is_number(text):
            raise ConfigError(
                explain(
                    f"{self.name}: {name} is not a number of processes or the index of one",
                    given=f"{name}={text}",
                    do=f"set {name} to a number, such as 2, or unset it, or {EXPLICIT_SETUP_HINT}",
                )
            )
        return int(text)

    def _pick(self, values: Environment, names: Sequence[str]) -> tuple[str, str] | None:
        """The variable to use, and its value: the first that is set; of a hint's, the largest (a
        value that is not a number counts as the largest, so that it is reported)."""
        found = [pair for name in names if (pair := _first_set(values, (name,)))]
        if self.is_hint and found:
            return max(
                found, key=lambda pair: int(pair[1]) if _is_number(pair[1]) else 10**MAX_DIGITS
            )
        return found[0] if found else None


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """What one launcher says about this process; None in a field: unknown."""

    launcher: Launcher
    variables: Environment
    """The environment variables that `count` and `index` come from, with their values."""
    address_variables: Environment
    """The environment variables that the address of process 0 comes from, with their values."""
    count: int | None
    index: int | None
    address: str | None
    port: str | None
    local_count: int | None
    local_index: int | None
    num_agents: int | None
    description: str
    job: str

    @property
    def is_complete(self) -> bool:
        """Whether the launcher gives a count above 1 and the index of this process."""
        return self.count is not None and self.count > 1 and self.index is not None

    @property
    def is_alone(self) -> bool:
        """Whether the launcher says that this is the only process."""
        return self.count == 1

    @property
    def is_partial(self) -> bool:
        """Whether the launcher implies several processes, but the count or the index is missing."""
        if self.is_complete or self.is_alone:
            return False
        return (
            self.count is not None
            or bool(self.index)
            or self.has_local_peers
            or not self.launcher.is_exported
        )

    @property
    def has_local_peers(self) -> bool:
        """Whether the launcher implies other processes on this host."""
        return bool(self.local_index) or (self.local_count or 0) > 1

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes of the run are known to be on this host."""
        return self.count is not None and self.local_count == self.count

    def agrees(self, other: "ProcessInfo") -> bool:
        """Whether `other` gives at least a count or an index, and what it gives equals this one's:
        the same processes, read from other variables.
        """
        return (
            other.count in (self.count, None)
            and other.index in (self.index, None)
            and (other.count, other.index) != (None, None)
        )

    def check(self) -> None:
        """Raises ConfigError if its numbers contradict one another."""
        row = self.launcher
        for index, count, names in (
            (self.index, self.count, (row.index, row.count)),
            (self.local_index, self.local_count, (row.local_index, row.local_count)),
        ):
            if row.is_hint:
                continue  # numbers of different launchers
            if count == 0 or (index is not None and count is not None and index >= count):
                given = [
                    name for name in variables_of(*names[0], *names[1]) if name in self.variables
                ]
                raise ConfigError(
                    explain(
                        f"the process index of {row.name} is not below its number of processes",
                        given=assignments(self.variables),
                        do=(
                            f"set {' to a number below '.join(given)}, or unset"
                            f" {'both' if len(given) > 1 else 'it'}, or {EXPLICIT_SETUP_HINT}"
                        ),
                    )
                )


EXPLICIT_SETUP_HINT = (
    "give --coordinator HOST:PORT --num-processes N --process-id I in each process (or set"
    f" {', '.join(VARIABLES)}), or start it alone whatever the environment says: --set"
    " distributed.launcher=none"
)
"""Advice that applies to every launcher: configure the processes explicitly."""


def assignments(values: Environment) -> str:
    """Variables as text: `A=1 B=2`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def variables_of(*names: str) -> list[str]:
    """The environment variables behind these names; the name of a derived value contains its
    variable, as `length of SM_HOSTS` does.
    """
    found = (
        variable
        for name in names
        for variable in (re.findall(r"\b[A-Z][A-Z0-9]*_\w+", name) if " " in name else [name])
    )
    return list(dict.fromkeys(found))


def settable(names: Sequence[str]) -> list[str]:
    """The names that are environment variables, not derived values."""
    return [name for name in names if " " not in name]


def derived_port(text: str) -> int:
    """A port computed from a text (CRC-32): equal texts give equal ports, other texts seldom do."""
    return FIRST_PORT + zlib.crc32(text.encode(errors="replace")) % NUM_PORTS


def common_parent(variable: str) -> int | None:
    """Process id of the launcher on this host: the nearest ancestor without `variable`, which is
    set in each process of the run. None: the system does not tell.
    """
    process = os.getppid()
    try:
        while process > 1:
            if not any(
                entry.startswith(f"{variable}=".encode())
                for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            ):
                return process
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _set_variables(names: Iterable[str], environment: Environment) -> Environment:
    """The environment variables behind these names that are set, with their values."""
    return dict(
        found for name in variables_of(*names) if (found := _first_set(environment, (name,)))
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def _first_set(values: Environment, names: Sequence[str]) -> tuple[str, str] | None:
    """The first of these variables that is set, and its value."""
    return next(
        ((name, values[name].strip()) for name in names if values.get(name, "").strip()), None
    )


def _value(values: Environment, names: Sequence[str]) -> str | None:
    found = _first_set(values, names)
    return None if found is None else found[1]
