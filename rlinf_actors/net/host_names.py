"""Host names of endpoints, looked up on threads of their own.

A name service that does not answer holds up a lookup for a minute, and nothing can end the lookup. libzmq looks a name
up on its only I/O thread: until then no socket of the process sends or receives, and the process cannot end. A lookup
of an event loop holds up the end of that loop. So lookups here run on daemon threads, and no end of the process waits
for them.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any

from rlinf_actors.exhaustion import OwnThread, start
from rlinf_actors.net.loop import call_threadsafe

Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
"""As `socket.getaddrinfo` returns it."""


def look_up(host: str, port: int, tell: Callable[[list[Address] | OSError], object]) -> None:
    """Call *tell*, on another thread, with the addresses of a host, those of IPv4 first; or with an error."""

    def run() -> None:
        try:
            found = _addresses(host, port)
        except OSError as error:
            tell(error)
        else:
            tell(found)

    try:
        start(OwnThread(target=run, name=f"looking up {host}", daemon=True))
    except RuntimeError as error:
        tell(OSError(str(error)))


def _addresses(host: str, port: int, flags: int = 0) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:  # a label that is empty or too long
        raise OSError(f"{host!r} is no host name: {error}") from None
    return sorted(found, key=lambda address: address[0] != socket.AF_INET)


async def resolve(host: str, port: int, timeout_s: float | None = None) -> list[Address]:
    """Return the addresses of a host, those of IPv4 first. An address is its own, and takes neither time nor a lookup.

    Raises:
        OSError: the host has none.
        asyncio.TimeoutError: the name service did not answer within *timeout_s* seconds; None waits for ever.
    """
    try:
        return _addresses(host, port, socket.AI_NUMERICHOST)
    except OSError:
        pass
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[Address]] = loop.create_future()
    look_up(host, port, functools.partial(call_threadsafe, loop, _settle, future))
    return await asyncio.wait_for(future, timeout_s)


def _settle(future: asyncio.Future[list[Address]], found: list[Address] | OSError) -> None:
    if future.done():  # cancelled
        return
    if isinstance(found, OSError):
        future.set_exception(found)
    else:
        future.set_result(found)


def endpoint(address: Address) -> str:
    """Return the TCP endpoint at an address."""
    ip, port = address[4][:2]
    return f"tcp://[{ip}]:{port}" if address[0] == socket.AF_INET6 else f"tcp://{ip}:{port}"
