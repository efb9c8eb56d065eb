"""Finding a head and asking it what it knows. An observer has no session: it asks and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import socket
import stat
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from rlinf_actors.cli.output import note
from rlinf_actors.cluster.hardware import ANSWER_S, ask_nodes
from rlinf_actors.config.cluster import ClusterConfig
from rlinf_actors.errors import ConfigError, ProtocolError
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.net.address import DEFAULT_LISTEN, endpoint_of
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.security import Security
from rlinf_actors.settings import HEAD, Settings
from rlinf_actors.wire.clients import Enumerated, EnumerateHardware
from rlinf_actors.wire.messages import Body
from rlinf_actors.wire.operators import GetStatus, Status
from rlinf_actors.wire.values import NodeState

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

SOCKET = "head"
"""Name of the head's socket in its agentd's run directory."""
OBSERVERS = ("head", "driver", "agent")
"""Whose key serves to ask a head: the administrator's first."""
TIMEOUT_S = 5.0

head_option: Callable[[F], F] = click.option(
    "--head",
    "head",
    metavar="HOST:PORT|DIR",
    help=f"The head's address, or the run directory of its agentd. Default: {HEAD}, else the one head that you or "
    "a script of yours runs on this machine.",
)


def parents(settings: Settings) -> list[str]:
    """Where this user's agentds may have their run directories."""
    usual = (tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR") or "/run")
    return list(dict.fromkeys([settings.run_dir, *usual] if settings.run_dir else usual))


def find_head(given: str | None, settings: Settings) -> str:
    """The endpoint of the head that is meant.

    Args:
        given: the option's value, None without.
        settings: the environment's.

    Raises:
        ConfigError: it is no address, or none is given and this user does not run exactly one head on this machine.
    """
    if given or settings.head:
        return _endpoint(given or settings.head or "", "--head" if given else HEAD)
    found = local_heads(settings)
    if len(found) == 1:
        note(f"looking at the cluster in {found[0].parent}")
        return f"ipc://{found[0]}"
    if not found:
        raise ConfigError(
            f"no head is known, and none of yours runs on this machine: pass --head HOST:PORT or set {HEAD}"
        )
    names = ", ".join(str(path.parent) for path in found)
    raise ConfigError(f"{len(found)} clusters are running here; say which by --head DIR: {names}")


def local_heads(settings: Settings) -> list[Path]:
    """Sockets of the heads that run on this machine as this user, private clusters' too; of nobody else's."""
    candidates = [path for parent in parents(settings) for path in sorted(Path(parent).glob(f"rlinf-*/{SOCKET}"))]
    return [path for path in candidates if _is_ours(path.parent) and _answers(path)]


def fetch_status(endpoint: str, settings: Settings) -> Status:
    """What the head at *endpoint* knows. Blocks.

    Raises:
        ClusterTimeoutError: no answer in TIMEOUT_S seconds.
        ConfigError: the endpoint may not be used from here.
    """
    return asyncio.run(_ask(endpoint, settings, GetStatus(), Status))


def status_of(head: str | None) -> tuple[str, Status]:
    """The endpoint that the option means, and what the head there knows."""
    settings = Settings.load()
    endpoint = find_head(head, settings)
    return endpoint, fetch_status(endpoint, settings)


def ask_head(head: str | None, question: Body, kind: type[T]) -> tuple[str, T]:
    """The endpoint that the option means, and the answer of the head there. Blocks; raises as `fetch_status`."""
    settings = Settings.load()
    endpoint = find_head(head, settings)
    return endpoint, asyncio.run(_ask(endpoint, settings, question, kind))


async def _ask(endpoint: str, settings: Settings, question: Body, kind: type[T]) -> T:
    async with observing(endpoint, settings) as client:
        return expected(await client.request(question, TIMEOUT_S), kind)


def fetch_hardware(
    endpoint: str, settings: Settings, config: ClusterConfig, states: Sequence[NodeState]
) -> list[NodeInfo]:
    """The nodes with the hardware that the configuration gives them, as they say. Blocks.

    Raises:
        As cluster.hardware.ask_nodes.
    """

    async def ask() -> list[NodeInfo]:
        async with observing(endpoint, settings) as client:

            async def request(asked: EnumerateHardware) -> Enumerated:
                return expected(await client.request(asked, ANSWER_S), Enumerated)

            return await ask_nodes(config, states, request)

    return asyncio.run(ask())


@contextlib.asynccontextmanager
async def observing(endpoint: str, settings: Settings) -> AsyncIterator[ControlClient]:
    """A connection to the head at *endpoint* that nobody there keeps account of."""
    from rlinf_actors.net.transport import ZmqNetwork

    network = ZmqNetwork(asyncio.get_running_loop(), Security.toward(endpoint, settings, *OBSERVERS))
    try:
        client = ControlClient(network, endpoint, f"observer:{uuid.uuid4().hex}".encode(), lambda notice: None)
        try:
            yield client
        finally:
            client.close()
    finally:
        network.close()


def who() -> str:
    """``USER@HOST`` of whoever asks, for others to read. A container's user may have no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the latter since Python 3.13
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def expected(answer: Body, kind: type[T]) -> T:
    """The answer, as what it must be."""
    if not isinstance(answer, kind):
        raise ProtocolError(f"the head answered with {type(answer).__name__}; a {kind.__name__} was expected")
    return answer


def _endpoint(text: str, source: str) -> str:
    if os.path.isdir(text):
        if not os.access(text, os.X_OK):
            owner = os.stat(text).st_uid
            raise ConfigError(f"{text!r} is a cluster of user {owner}, not of yours ({os.getuid()})", path=source)
        return f"ipc://{os.path.join(os.path.abspath(text), SOCKET)}"
    try:
        return endpoint_of(text, source)
    except ConfigError as error:
        message = f"{text!r} is neither HOST:PORT (such as {DEFAULT_LISTEN}) nor a run directory"
        raise ConfigError(message, path=source) from error


def _is_ours(directory: Path) -> bool:
    info = directory.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def _answers(path: Path) -> bool:
    """Whether somebody listens; a cluster that was killed leaves a socket that refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
