"""The address of the coordinator, process 0, as the launchers and the environment give it."""

import os

from optimus_jax.cluster.process_info import (
    EXPLICIT_SETUP_HINT,
    ProcessInfo,
    assignments,
    common_parent,
    derived_port,
    settable,
)
from optimus_jax.config.checks import is_host_and_port
from optimus_jax.errors import ConfigError, explain

ADDRESS_VARIABLE, PORT_VARIABLE = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"
"""JAX's own variables, which override the coordinator's address."""


def coordinator_address(info: ProcessInfo, sources: list[ProcessInfo]) -> tuple[str, bool]:
    """Address of process 0, and whether all processes are known to be on this host. JAX's variables
    override the launcher's.
    """
    override_host, override_port = (
        os.environ.get(ADDRESS_VARIABLE, "").strip(),
        os.environ.get(PORT_VARIABLE, "").strip(),
    )
    if info.launcher.is_explicit:
        override_host = override_port = ""
    if override_port and not is_host_and_port(f"host:{override_port}"):
        raise ConfigError(
            explain(
                f"{PORT_VARIABLE} names a port",
                given=override_port,
                do="give a number from 1 to 65535, such as 1234, or unset it",
            )
        )
    if override_host:
        address = (
            override_host
            if is_host_and_port(override_host) or not override_port
            else f"{override_host}:{override_port}"
        )
        if not is_host_and_port(address):
            raise ConfigError(
                explain(
                    f"{ADDRESS_VARIABLE} names a host and a port",
                    given=override_host,
                    do="give HOST:PORT, such as 10.0.0.1:1234, or unset it",
                )
            )
        return address, False
    is_local = any(source.is_on_one_host for source in sources)
    source = next((source for source in sources if source.address is not None), None)
    if source is None:
        if not is_local:
            raise _no_address_error(info)
        return f"localhost:{override_port or info.port or _port_on_this_host(info, sources)}", True
    assert source.address is not None
    host, _, port = source.address.rpartition(":")
    if not (
        host and is_host_and_port(source.address) and (":" not in host or host.startswith("["))
    ):
        # Our own variable names both.
        host, port = (
            source.address,
            source.port
            or (
                ""
                if source.launcher.is_explicit
                else str(derived_port(source.job or source.address))
            ),
        )
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    address = f"{host}:{override_port or port}"
    if not is_host_and_port(address) or any(
        character.isspace() or character == "/" for character in address
    ):
        names = " and ".join(source.address_variables)
        remedy = f"set {names} to a HOST and a PORT (such as 10.0.0.1 and 1234)"
        if not settable(source.launcher.address):
            remedy = f"set {ADDRESS_VARIABLE}=HOST:PORT to the host of process 0 in each"
        raise ConfigError(
            explain(
                f"{source.launcher.name} does not name a host and a port for process 0 to"
                " listen on",
                given=f"{names}: {address}".removeprefix(": "),
                do=f"{remedy}, or {EXPLICIT_SETUP_HINT}",
            )
        )
    is_loopback = host in ("localhost", "127.0.0.1", "[::1]")
    if (
        source.launcher.is_exported
        and is_loopback
        and info.index
        and not is_local
        and source.local_count is not None
    ):
        named = [name for name in source.address_variables if name in source.launcher.address]
        raise ConfigError(
            explain(
                f"{source.launcher.name} names this host itself for process 0, which is on"
                " another one",
                given=f"{address}, {assignments(info.variables)}",
                do=f"set {' or '.join(named)} to the host of process 0, or {EXPLICIT_SETUP_HINT}",
            )
        )
    return address, is_loopback and is_local and host != "[::1]"


def _port_on_this_host(info: ProcessInfo, sources: list[ProcessInfo]) -> int:
    """A port that is the same in all processes of a run, and seldom that of another run on this
    host."""
    if job := next((source.job for source in sources if source.job), ""):
        return derived_port(job)
    for source in sources:
        if (
            source.launcher.has_one_parent
            and (parent := common_parent(source.launcher.index[0])) is not None
        ):
            return derived_port(str(parent))
    raise _no_address_error(info)


def _no_address_error(info: ProcessInfo) -> ConfigError:
    launcher = info.launcher
    names = settable(launcher.address)
    remedy = f"set {' or '.join(names)} too, or " if names else ""
    return ConfigError(
        explain(
            f"{launcher.name} says that there are several processes, and does not say where the"
            " first one is",
            given=assignments(info.variables),
            do=(
                f"{remedy}set {ADDRESS_VARIABLE}=HOST:PORT to the host of process 0 in each, or"
                f" {EXPLICIT_SETUP_HINT}"
            ),
        )
    )
