"""What one launcher of processes says about this one, read from the environment variables that it
sets (launchers.py lists them).
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
"""What the three flags say, for whoever starts processes by other means."""
WHERE = "where"
"""Name of a derived text that says which part of a job this is, for people."""
FIRST_PORT, NUM_PORTS = 61440, 4096
"""Ports that nobody is given by the system unasked, as JAX chooses them too."""
MOST_DIGITS = 6
"""Of a number of processes."""
NOT_ONE_OF_SEVERAL = "-1"
"""What scripts for PyTorch have for a rank where nothing is distributed."""

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One launcher.

    Of several variables in a field, the first that is set counts; an empty one is not set.
    """

    name: str
    count: tuple[str, ...] = ()
    """Number of processes of the run."""
    index: tuple[str, ...] = ()
    """Which one this is, from 0."""
    address: tuple[str, ...] = ()
    """HOST or HOST:PORT of process 0; none: it does not say, and a run on one host meets at
    localhost."""
    port: tuple[str, ...] = ()
    """Where process 0 may listen; none: a port is derived from `job` or the address, the same in
    all processes."""
    local_count: tuple[str, ...] = ()
    """Processes of the run on this host."""
    local_index: tuple[str, ...] = ()
    """Which of these this is, from 0."""
    job: tuple[str, ...] = ()
    """What all processes of this start of the run have in common, and no others."""
    needs: tuple[str, ...] = ()
    """It is this launcher only where all of these are set."""
    unless: tuple[str, ...] = ()
    """It is this launcher only where none of these is set."""
    num_said: int = 1
    """It is this launcher only where so many of count, index and address are set: 2 where the names
    are common words."""
    restarts: bool = False
    """Whether it starts jobs again after a fault, and not after a mistake."""
    is_explicit: bool = False
    """The user's own words to us: they win over all launchers, and have to be complete."""
    is_exported: bool = False
    """People export these variables themselves too: an index of 0 alone means nothing, and an outer
    launcher must not contradict."""
    is_hint: bool = False
    """Its variables belong to several launchers, and say that there are others and no more: of
    several in a field the largest number counts."""
    has_one_parent: bool = False
    """One process of the launcher on each host starts the run's processes there."""
    num_agents: tuple[str, ...] = ()
    """Number of its agents, where an outer launcher starts these and has to start as many."""
    gives_gpus: Callable[[Environment], bool] = lambda environment: False
    """Whether each process sees only GPUs of its own."""
    derive: Callable[[Environment], Environment] = lambda environment: {}
    """What is said in lists or JSON, as plain values. Raises ValueError if that cannot be read."""

    def read(self, environment: Environment) -> "Claim | None":
        """What it says about this process; None: it has not started it.

        Raises:
          ConfigError: it says something that cannot be meant.
        """
        if any(not _said(environment, (name,)) for name in self.needs) or _said(
            environment, self.unless
        ):
            return None
        try:
            values = {**environment, **self.derive(environment)}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            told = _as_set(
                (*self.needs, *self.index, *self.count, *self.address, *self.port), environment
            )
            raise ConfigError(
                explain(
                    f"{self.name} has started this process, and what it says cannot be read",
                    given=f"{listed(told)}: {error}",
                    do=f"mend or unset {' and '.join(told)}, or {OTHER_WAYS}",
                )
            ) from error
        if self.is_exported:
            values = self._without_none(values)
        fields = [self.count, self.index]
        if self.is_explicit or self.num_said > 1:
            fields.append(self.address)
        if self.is_hint:
            fields += [self.local_count, self.local_index]
        if sum(_said(values, field) is not None for field in fields) < self.num_said:
            return None
        numbers = (self.count, self.index, self.local_count, self.local_index)
        said = dict(found for field in numbers if (found := self._pick(values, field)))
        meeting = [
            found[0] for field in (self.address, self.port) if (found := _said(values, field))
        ]
        claim = Claim(
            launcher=self,
            said=_as_set(said, environment),
            said_address=_as_set(meeting, environment),
            count=self._number(values, self.count),
            index=self._number(values, self.index),
            address=_value(values, self.address),
            port=_value(values, self.port),
            local_count=self._number(values, self.local_count),
            local_index=self._number(values, self.local_index),
            num_agents=self._number(values, self.num_agents),
            where=values.get(WHERE) or f" ({listed(said)})",
            job=_value(values, self.job) or "",
        )
        claim.check()
        return claim

    def _without_none(self, values: Environment) -> Environment:
        """Without -1, which says that a process is not one of several, unless a count says that it
        is.
        """
        if any(
            value not in (NOT_ONE_OF_SEVERAL, "1")
            for names in (self.count, self.local_count)
            for name in names
            if (value := _value(values, (name,)))
        ):
            return values
        numbers = {*self.count, *self.index, *self.local_count, *self.local_index}
        return {
            name: value
            for name, value in values.items()
            if name not in numbers or value.strip() != NOT_ONE_OF_SEVERAL
        }

    def _number(self, values: Environment, names: Sequence[str]) -> int | None:
        if (found := self._pick(values, names)) is None:
            return None
        name, text = found
        if not _is_number(text):
            raise ConfigError(
                explain(
                    f"{self.name}: {name} is a number of processes, or of one of them",
                    given=f"{name}={text}",
                    do=f"set {name} to a number, such as 2, or unset it, or {OTHER_WAYS}",
                )
            )
        return int(text)

    def _pick(self, values: Environment, names: Sequence[str]) -> tuple[str, str] | None:
        """The variable that counts, and its value; of a hint's, one that is no number comes
        first."""
        found = [pair for name in names if (pair := _said(values, (name,)))]
        if self.is_hint and found:
            return max(
                found, key=lambda pair: int(pair[1]) if _is_number(pair[1]) else 10**MOST_DIGITS
            )
        return found[0] if found else None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one launcher says about this process; None: it does not say."""

    launcher: Launcher
    said: Environment
    """The variables that say it, as they are set."""
    said_address: Environment
    """Those that say where process 0 is, as they are set."""
    count: int | None
    index: int | None
    address: str | None
    port: str | None
    local_count: int | None
    local_index: int | None
    num_agents: int | None
    where: str
    job: str

    @property
    def is_whole(self) -> bool:
        """Whether it says that there are several and which one this is."""
        return self.count is not None and self.count > 1 and self.index is not None

    @property
    def is_alone(self) -> bool:
        """Whether it says that there are no others."""
        return self.count == 1

    @property
    def is_partial(self) -> bool:
        """Whether it says that there are several, and not how many or which one this is."""
        if self.is_whole or self.is_alone:
            return False
        return (
            self.count is not None
            or bool(self.index)
            or self.has_local_peers
            or not self.launcher.is_exported
        )

    @property
    def has_local_peers(self) -> bool:
        """Whether it says that there are other processes on this host."""
        return bool(self.local_index) or (self.local_count or 0) > 1

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes of the run are known to be on this host."""
        return self.count is not None and self.local_count == self.count

    def agrees(self, other: "Claim") -> bool:
        """Whether both say the same, as far as `other` says anything: of two launchers, or one seen
        in two ways.
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
                told = [name for name in variables_of(*names[0], *names[1]) if name in self.said]
                raise ConfigError(
                    explain(
                        f"{row.name}: processes are counted from 0, and there are fewer than that",
                        given=listed(self.said),
                        do=(
                            f"set {' to a number below '.join(told)}, or unset"
                            f" {'both' if len(told) > 1 else 'it'}, or {OTHER_WAYS}"
                        ),
                    )
                )


OTHER_WAYS = (
    "give --coordinator HOST:PORT --num-processes N --process-id I in each process (or set"
    f" {', '.join(VARIABLES)}), or start it alone whatever the environment says: --set"
    " distributed.engine=none"
)
"""What always helps."""


def listed(values: Environment) -> str:
    """`A=1 B=2`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def documented(launcher: Launcher) -> str:
    """Its row in docs/clusters.md."""

    def cell(names: Sequence[str]) -> str:
        return " or ".join(name if " " in name else f"`{name}`" for name in names)

    needs = " and ".join(
        [cell((name,)) for name in launcher.needs]
        + [f"no {cell((name,))}" for name in launcher.unless]
    )
    where = cell(launcher.address) + (f", port {cell(launcher.port)}" if launcher.port else "")
    local = ", ".join(filter(None, (cell(launcher.local_index), cell(launcher.local_count))))
    cells = (
        launcher.name,
        needs,
        cell(launcher.count),
        cell(launcher.index),
        where,
        local,
        "yes" if launcher.restarts else "",
    )
    return "| " + " | ".join(text or "-" for text in cells) + " |"


def variables_of(*names: str) -> list[str]:
    """The environment variables in these names, of which derived ones describe theirs: `length of
    SM_HOSTS` has `SM_HOSTS`.
    """
    found = (
        variable
        for name in names
        for variable in (re.findall(r"\b[A-Z][A-Z0-9]*_\w+", name) if " " in name else [name])
    )
    return list(dict.fromkeys(found))


def settable(names: Sequence[str]) -> list[str]:
    """Those of these that a user can set to the value itself."""
    return [name for name in names if " " not in name]


def derived_port(text: str) -> int:
    """A port that is the same for the same text, and seldom for another one."""
    return FIRST_PORT + zlib.crc32(text.encode(errors="replace")) % NUM_PORTS


def common_parent(variable: str) -> int | None:
    """The nearest process above this one without a variable that is set for each process of a run:
    the launcher's own, which has started all of the run's processes on this host. None: the system
    does not say.
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


def _as_set(names: Iterable[str], environment: Environment) -> Environment:
    """The variables that these names come from, as they are set."""
    return dict(found for name in variables_of(*names) if (found := _said(environment, (name,))))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


def _said(values: Environment, names: Sequence[str]) -> tuple[str, str] | None:
    """The first of these variables that is set, and its value."""
    return next(
        ((name, values[name].strip()) for name in names if values.get(name, "").strip()), None
    )


def _value(values: Environment, names: Sequence[str]) -> str | None:
    found = _said(values, names)
    return None if found is None else found[1]
