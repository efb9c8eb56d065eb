"""Requests of commands to a head. A command has no session: it connects, sends its requests, and disconnects.

`observing` shows what a command waits for, so a verb has to say only what its answer is about (`Looking`).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import click

from rlinf_actors.cli.output import note
from rlinf_actors.errors import ProtocolMismatchError
from rlinf_actors.net import discovery
from rlinf_actors.net.link import Network
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.socket_security import Security
from rlinf_actors.runtime.progress import Facts, named, seen, showing
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.settings import HEAD, Settings
from rlinf_actors.version import VERSION
from rlinf_actors.wire.client_messages import GetStatus, Status
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.protocol import PROTOCOL, expected, what_to_upgrade

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Looking = Callable[[Status], Facts]
"""Says by a cluster's state how far a wait for the head is."""

OBSERVERS = ("head", "driver", "agent", "viewer")
"""Roles whose key a command may use to connect, in the order in which they are tried."""
TIMEOUT_S = 5.0

head_option: Callable[[F], F] = click.option(
    "--head",
    "head",
    metavar="HOST:PORT|DIR",
    help=f"The head's address, or the run directory of its agentd. Default: {HEAD}, else the head in the client file, "
    "else your only standing head on this machine, else your only private cluster.",
)


def find_head(given: str | None, settings: Settings) -> str:
    """Return the endpoint of the head that a command talks to. *given* is the value of --head.

    If neither --head nor a setting names a head, search for one on this machine, and print the address of the head that
    was found on stderr.
    """
    endpoint, found = discovery.find_head(given, settings)
    if found:
        note(f"using the {found}")
    return endpoint


def fetch_status(endpoint: str, settings: Settings) -> Status:
    """Ask the head at *endpoint* for the state of the cluster, and return it. Blocks, for at most TIMEOUT_S seconds.

    Raise ProtocolMismatchError if the head speaks another protocol.
    """
    status = asyncio.run(_ask(endpoint, settings, GetStatus(), Status))
    if status.protocol != PROTOCOL:
        raise ProtocolMismatchError(
            f"the head at {endpoint} is rlinf-actors {status.version} (protocol {status.protocol}), this command is "
            f"{VERSION} (protocol {PROTOCOL}): {what_to_upgrade(status.protocol, 'the head', 'this environment')}"
        )
    return status


def status_of(head: str | None) -> tuple[str, Status]:
    """Ask a head for the state of the cluster. Return the head's endpoint and the state. *head* is the value of --head.
    Blocks.
    """
    settings = discovery.client_settings()
    endpoint = find_head(head, settings)
    return endpoint, fetch_status(endpoint, settings)


def ask_head(
    head: str | None, question: Body, kind: type[T], timeout_s: float | None = None, look: Looking | None = None
) -> tuple[str, T]:
    """Send *question* to a head, and return the head's endpoint and its answer. *head* is the value of --head. Blocks,
    for at most *timeout_s* (by default TIMEOUT_S). *look* says how far the head is, for progress on stderr.

    Raise ProtocolError if the answer is not of the type *kind*.
    """
    settings = discovery.client_settings()
    endpoint = find_head(head, settings)
    return endpoint, asyncio.run(_ask(endpoint, settings, question, kind, timeout_s, look))


async def _ask(
    endpoint: str,
    settings: Settings,
    question: Body,
    kind: type[T],
    timeout_s: float | None = None,
    look: Looking | None = None,
) -> T:
    async with observing(endpoint, settings, look=look) as client:
        return expected(await client.request(question, timeout_s or TIMEOUT_S), kind)


class Observer(ControlClient):
    """The connection of a command. It knows which requests are not answered yet."""

    def __init__(self, network: Network, endpoint: str) -> None:
        identity = f"observer:{uuid.uuid4().hex}".encode()
        super().__init__(network, endpoint, identity, lambda notice: None, self._listen_again)
        self._asked: list[Body] = []
        self._followed: list[Body] = []

    async def request(self, body: Body, timeout: float | None = None, *args: Any, **options: Any) -> Body:
        """Send a request like `ControlClient.request`, and show the wait for its answer."""
        self._asked.append(body)
        try:
            return await super().request(body, timeout, *args, **options)
        finally:
            self._asked = [one for one in self._asked if one is not body]

    async def listen(self, body: Body, timeout: float, again: bool = False) -> Body:
        """Send a request that the head answers when something happens. The wait for that is not shown.

        With *again*, a head that was restarted meanwhile is asked at once too. It may not know the nodes yet.
        """
        if not again:
            return await super().request(body, timeout)
        self._followed.append(body)
        try:
            return await super().request(body, timeout)
        finally:
            self._followed = [one for one in self._followed if one is not body]

    def _listen_again(self) -> None:
        for body in self._followed:
            self.repeat(body)

    async def waits(self, look: Looking | None, missing: bool) -> Facts | None:
        """Return what this command waits for, None if it waits for no answer. If *look* is given, it says so."""
        if not self._asked:
            return None
        nodes = {str(getattr(one, "node_id", "")) for one in self._asked}
        if look is None and nodes == {""}:
            return Facts(f"waiting for the head at {self.endpoint}")
        status = expected(await super().request(GetStatus(), TIMEOUT_S), Status)
        if look is not None:
            return look(status)
        asked = [node for node in status.nodes if node.report.node_id in nodes]
        names = sorted(node.report.hostname for node in asked)
        return Facts(named("waiting for the answer of ", names), named("", [seen(node) for node in asked]))


@contextlib.asynccontextmanager
async def observing(
    endpoint: str, settings: Settings, key: KeyFile | None = None, look: Looking | None = None
) -> AsyncIterator[Observer]:
    """Connect to the head at *endpoint* for a ``with`` block, without a session: the head keeps nothing about this
    process. *key* identifies this process; by default a key of this user.

    On stderr is shown what the block waits for. *look* says it if the block has something better to say than who has
    not answered.
    """
    from rlinf_actors.net.zmq_network import ZmqNetwork

    security = Security.of(key) if key else discovery.security_toward(endpoint, settings, *OBSERVERS)
    network = ZmqNetwork(asyncio.get_running_loop(), security)
    try:
        client = Observer(network, endpoint)
        try:
            async with showing(partial(client.waits, look), ""):
                yield client
        finally:
            client.close()
    finally:
        network.close()
