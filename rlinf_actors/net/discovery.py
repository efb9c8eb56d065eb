"""Finds the head that a command or driver connects to if the user did not name one.

| caller | head |
|---|---|
| all commands but estop | --head; RLINF_HEAD; client file; the only standing head here, or private cluster here |
| Cluster() | its argument; RLINF_HEAD; the client file. Never a head that was not named |
| estop | all of them (`rlinf_actors.cli.estop`) |

"Here" means: of this user, on this machine; for root without a head of its own also the head of rlinf-head.service.
`rlinf-actors estop` imports this module: no asyncio, click or rich here.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rlinf_actors.config_files import open_regular
from rlinf_actors.conversion import convert
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.head_records import OF_HEAD_UNIT, SOCKET, HeadRecord, MachineRecords, find_records
from rlinf_actors.net.host import DEFAULT_LISTEN, endpoint_of, split_address
from rlinf_actors.net.socket_security import Security, is_loopback, is_tcp
from rlinf_actors.net.unix_sockets import trusted, user_name
from rlinf_actors.plurals import counted
from rlinf_actors.settings import CLIENT_CONFIG, HEAD, Settings

if TYPE_CHECKING:
    from rlinf_actors.security.keyfile import KeyFile

MAX_BYTES = 65536
"""Most bytes that are read of a client file."""
PRIVATE = "private"
"""As the head's address this asks for a private cluster, even if the client file names a head."""
SHOWN_PRIVATE = 3
"""Most private clusters that are named beside a standing head."""
CLIENT_FILE = "rlinf-actors/client.toml"
"""Path of a client file, relative to /etc and to the user's configuration directory."""


class ClientFile(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of a client file. docs/reference/settings.md has their docstrings."""

    head: Annotated[str, Meta(min_length=1)] | None = None
    """HOST:PORT of the head that scripts and `rlinf-actors` use if RLINF_HEAD is not set."""
    key_file: Annotated[str, Meta(min_length=1)] | None = None
    """The key file that they use if neither RLINF_ACTORS_KEYS nor RLINF_ACTORS_KEY_FILE is set."""


# --- the client file ---


def client_settings() -> Settings:
    """Return the settings from environment variables, completed by the client files.

    /etc/rlinf-actors/client.toml is for all users of the machine; ~/.config/rlinf-actors/client.toml overrides it, and
    an environment variable overrides both.

    Raises:
        ConfigError: a variable or a client file is wrong. `path` of the error names the variable or file.
    """
    return with_client_file(Settings.load())


def with_client_file(settings: Settings) -> Settings:
    """Return *settings* with the values that are not set taken from the client files. Raises ConfigError if a file is
    wrong.
    """
    chosen = settings.client_config
    usual = (f"/etc/{CLIENT_FILE}", os.path.join(os.path.expanduser(settings.config_home), CLIENT_FILE))
    values: dict[str, tuple[str, str]] = {}
    for path in (chosen,) if chosen else usual:
        values.update({key: (value, path) for key, value in read_client_file(path, must_exist=bool(chosen)).items()})
    if settings.head is None and "head" in values:
        head, path = values["head"]
        settings = replace(settings, head=head, head_from=f"{path}: head")
    if settings.key_file is None and settings.key_dir is None and "key_file" in values:
        settings = replace(settings, key_file=os.path.expanduser(values["key_file"][0]))
    return settings


def read_client_file(path: str, must_exist: bool = False) -> dict[str, str]:
    """Return the settings in the client file *path*; an empty dict if the file does not exist.

    Raises:
        ConfigError: the file is not TOML, has an unknown key, or others can write to it; or it does not exist although
            *must_exist* is True.
    """
    try:
        with open_regular(path) as file:
            info = os.fstat(file.fileno())
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise ConfigError("does not exist", path=f"{CLIENT_CONFIG} {path}") from None
        return {}
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=path) from None
    if not trusted(info.st_uid) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"others can write to it (mode {stat.S_IMODE(info.st_mode):04o}, owner {info.st_uid}), and it says which "
            f"head this user trusts: chown {os.geteuid()} {path} && chmod 644 {path}",
            path=path,
        )
    if len(data) > MAX_BYTES:
        raise ConfigError(f"has more than {MAX_BYTES:,} bytes", path=path)
    from rlinf_actors.toml_text import parse_toml  # 10 ms: not where there is no file

    try:
        values = parse_toml(data.decode(), path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not TOML: {error}", path=path) from None
    found = convert(values, ClientFile, f"{path}: ")
    return {key: value for key, value in msgspec.structs.asdict(found).items() if value is not None}


# --- choosing a head ---


def find_head(given: str | None, settings: Settings) -> tuple[str, str]:
    """Return the endpoint of the head that a command connects to, and a description of that head for people.

    The description is "" if the user named the head. A second line of it names private clusters that run beside a
    standing head.

    Args:
        given: the value of --head, None if the option was not given.
        settings: the settings, completed by the client files (`client_settings`).

    Raises:
        ConfigError: the named address is malformed or its host name has no address. Or no head is named, this user
            runs neither exactly one standing head on this machine nor, without standing heads, exactly one private
            cluster, and no key of this user says where its head is.
    """
    text, source = named(given, settings)
    if text:
        return endpoint_at(text, source), ""
    seen = find_records(settings)
    heads = [record for record in seen.records if record.kind != "node"] or _of_unit(settings)
    candidates = [record for record in heads if record.kind == "head"] or heads
    if len(candidates) == 1:
        only = f"{candidates[0].told()} ({candidates[0].address})"
        return candidates[0].ways[0], only + _beside([one for one in heads if one.kind == "private"], candidates[0])
    if candidates:
        raise ConfigError(
            f"{len(candidates)} heads of yours run on this machine; say which by --head, or by {HEAD}:\n{table(heads)}"
        )
    if key := _key_with_address(settings):
        return endpoint_at(key.address, key.path), f"head at {key.address}, for which {key.path} was made"
    raise ConfigError(
        f"no head is known, and none of yours runs on this machine: pass --head HOST:PORT, set {HEAD}, or write "
        f'head = "HOST:PORT" into /etc/{CLIENT_FILE} or ~/.config/{CLIENT_FILE}{_hint(seen)}'
    )


def _beside(private: Sequence[HeadRecord], chosen: HeadRecord) -> str:
    """Return a line about the private clusters that run beside the *chosen* head; "" if none does."""
    if not private or chosen in private:
        return ""
    options = ", ".join(f"--head {record.address}" for record in private[-SHOWN_PRIVATE:])
    more = f"{options} and {len(private) - SHOWN_PRIVATE} older ones" if len(private) > SHOWN_PRIVATE else options
    return f"\n{counted(len(private), 'private cluster', 'also runs|also run')}: {more}"


def _key_with_address(settings: Settings) -> KeyFile | None:
    """Return this user's key of a driver or node if it says where its head is, and that head admits it there."""
    from rlinf_actors.security import keyfile

    found = keyfile.find(settings, "driver", "agent") if settings.head != PRIVATE else None
    if found is None or not found.address:
        return None
    here = is_loopback(split_address(found.address, found.path)[0])
    return None if here and keyfile.is_for_elsewhere(Path(found.path), settings) else found


def standing_heads(settings: Settings) -> list[HeadRecord]:
    """Return the standing heads of this machine that `find_head` chooses from."""
    own = [record for record in find_records(settings).records if record.kind == "head"]
    return own or _of_unit(settings)


def _of_unit(settings: Settings) -> list[HeadRecord]:
    """Return the head of rlinf-head.service, whatever its user, for root. It is the only head of another user that root
    uses without being told: a user cannot make a record in the unit's directory.
    """
    if os.geteuid() != 0:
        return []
    records = find_records(settings, everybody=True).records
    return [record for record in records if record.kind == "head" and os.path.dirname(record.path) == OF_HEAD_UNIT]


def _hint(seen: MachineRecords) -> str:
    """Return text for an error that no head was found: the heads that agentds of this machine have joined, the records
    that could not be read, and the other users who run heads or agentds.
    """
    nodes = {record.address: record.pid for record in seen.records if record.kind == "node"}
    hints = [f"agentd (pid {pid}) of this machine has joined the head at {address}" for address, pid in nodes.items()]
    hints += [f"{path} cannot be read: {why}" for path, why in seen.unreadable]
    if seen.others:
        users = ", ".join(map(user_name, seen.others))
        hints.append(f"a head or agentd of another user runs here ({users}): root finds the head of rlinf-head.service")
    return "".join(f". {hint}" for hint in hints)


def table(records: Sequence[HeadRecord]) -> str:
    """Return a text for people with one line for each head: the --head option that chooses the head, and its
    description.
    """
    width = max(len(record.address) for record in records)
    return "\n".join(f"  --head {record.address.ljust(width)}  {record.told()}" for record in records)


def named(given: str | None, settings: Settings) -> tuple[str, str]:
    """Return the head's address that the user named, and the option or setting that names it; ("", "") if none does.

    *given* is the value of --head, None if the option was not given.
    """
    if given:
        return given, "--head"
    if settings.head and settings.head != PRIVATE:
        return settings.head, settings.head_from
    return "", ""


def endpoint_at(text: str, source: str, resolve: bool = True) -> str:
    """Return the endpoint of the head that *text* names: HOST:PORT, an endpoint, or the run directory of an agentd.

    Args:
        text: the address as the user wrote it.
        source: the option, variable or file that the address is from, for errors.
        resolve: True to check that a host name has an address. The check may block.

    Raises:
        ConfigError: the address is malformed, its host name has no address, or the run directory is another user's.
    """
    if os.path.isdir(text):
        owner = os.stat(text).st_uid
        if owner != os.geteuid() != 0:
            raise ConfigError(f"{text!r} is a cluster of user {owner}, not of yours ({os.geteuid()})", path=source)
        return f"ipc://{os.path.join(os.path.abspath(text), SOCKET)}"
    try:
        endpoint = endpoint_of(text, source)
    except ConfigError as error:
        message = f"{text!r} is neither HOST:PORT (such as {DEFAULT_LISTEN}) nor a run directory"
        raise ConfigError(message, path=source) from error
    if resolve:
        check_name(endpoint, source)
    return endpoint


def check_name(endpoint: str, source: str) -> None:
    """Raise ConfigError if the host name in *endpoint* has no address. Blocks.

    *source* is the option, variable or file that the endpoint is from, for the error.
    """
    if not is_tcp(endpoint):
        return
    host, port = split_address(endpoint, source)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"the head's name {host!r} cannot be resolved ({why}): is it spelt right? `getent hosts {host}` shows what "
            "this machine knows; an IP address needs no name service",
            path=source,
        ) from None


def security_toward(endpoint: str, settings: Settings, *roles: str) -> Security:
    """Return the keys with which this process connects to the head at *endpoint*.

    They are the keys of this process's key file for one of *roles*. But if the settings name no key, and a standing
    head of this user listens at *endpoint* on this machine, they are that head's own keys.

    Raises:
        ConfigError: there is a key file that cannot be used.
    """
    if is_tcp(endpoint) and settings.key_dir is None and settings.key_file is None:
        for record in (*find_records(settings).records, *_of_unit(settings)):
            if record.key and record.kind == "head" and endpoint in record.ways:
                return record.security()
    return Security.toward(endpoint, settings, *roles)


def local_way(endpoint: str, settings: Settings) -> str:
    """Return the unix socket of the head at *endpoint* if that is a head of this user on this machine that has one.
    Otherwise return *endpoint*. A unix socket needs no key.
    """
    if is_tcp(endpoint):
        for record in (*find_records(settings).records, *_of_unit(settings)):
            if record.kind != "node" and endpoint in record.ways and not is_tcp(record.ways[0]):
                return record.ways[0]
    return endpoint


def is_here(endpoint: str, listens: str) -> bool:
    """Return True if *endpoint* leads to a listener of this machine that was bound to *listens*.

    This is certain only if *listens* is every address (0.0.0.0 or ::), the ports are equal, and the host in *endpoint*
    is an IP address of this machine. Otherwise the result is False.
    """
    if not (is_tcp(endpoint) and is_tcp(listens)):
        return False
    try:
        (host, port), (every, its) = split_address(endpoint, ""), split_address(listens, "")
        if port != its or every not in ("0.0.0.0", "::", "*"):
            return False
        address = ipaddress.ip_address(host)  # a name is not resolved: that may block
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))  # the kernel takes no address that is not this machine's
    except (OSError, ValueError):
        return False
    return True
