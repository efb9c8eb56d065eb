"""Whether anything listens at an endpoint, which tells a process that is gone from a network that is cut, and what."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Coroutine
from typing import Any

from rlinf_actors.net.address import split_address
from rlinf_actors.net.link import Found, Sight
from rlinf_actors.net.silence import LOOK_TIMEOUT_S
from rlinf_actors.scarce import explain

log = logging.getLogger(__name__)

ANSWERS_S = 0.5
"""How long a connection may take."""
SPEAKS_S = 0.5
"""How long what listens there may take to begin, and then to end its greeting."""
STAYS_S = 0.2
"""A connection that is open that long after the greeting is not one too many."""
_OF_THIS_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""What is missing here when a connection fails with these; they say nothing of the network."""
_MARK = b"\xff" + bytes(8) + b"\x7f"
"""How ZeroMQ begins (ZMTP 3.1, RFC 37): 10 bytes; then 2 of the version, 20 of the mechanism's name, and 32."""
_GREETING = _MARK + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


async def look_at(endpoint: str, timeout_s: float = LOOK_TIMEOUT_S) -> Sight:
    """Open a connection to *endpoint* and close it again.

    The kernel answers for a process that is stopped or busy, and refuses for one that is gone. Cancelling gives up.
    Where this machine cannot look, since it has no descriptor or port left, nobody is called silent.

    Args:
        endpoint: of ZeroMQ, tcp or ipc.
        timeout_s: how long the answer may take, in seconds.
    """
    opening: Coroutine[Any, Any, Any]
    if endpoint.startswith("ipc://"):
        opening = asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
    else:
        opening = asyncio.open_connection(*split_address(endpoint, "endpoint"))
    try:
        _, writer = await asyncio.wait_for(opening, timeout_s)
    except (ConnectionRefusedError, FileNotFoundError):
        return Sight.REFUSED
    except (OSError, asyncio.TimeoutError) as error:
        if endpoint.startswith("ipc://"):
            return Sight.LISTENS  # its queue is full, perhaps; no network lies between us
        if isinstance(error, OSError) and error.errno in _OF_THIS_MACHINE:
            log.warning("cannot look whether %s is there: %s; it is taken for there", endpoint, explain(error))
            return Sight.LISTENS  # a cut would end all that waits for it
        log.debug("%s is out of reach: %s", endpoint, error or type(error).__name__)
        return Sight.SILENT
    writer.close()
    return Sight.LISTENS


async def identify(endpoint: str) -> Found:
    """Find out who listens at *endpoint*, by the first bytes of a connection. Cancelling gives up.

    Args:
        endpoint: of ZeroMQ, tcp or ipc; of the latter only whether anybody does.
    """
    if endpoint.startswith("ipc://"):
        return Found.NOBODY if await look_at(endpoint, ANSWERS_S) is Sight.REFUSED else Found.MUTE
    try:
        opening = asyncio.open_connection(*split_address(endpoint, "endpoint"))
        reader, writer = await asyncio.wait_for(opening, ANSWERS_S)
    except ConnectionRefusedError:
        return Found.NOBODY
    except socket.gaierror:
        return Found.NAMELESS
    except (OSError, asyncio.TimeoutError):
        return Found.SILENT
    try:
        writer.write(_GREETING)
        if await asyncio.wait_for(reader.readexactly(1), SPEAKS_S) != _MARK[:1]:
            return Found.OTHER
        said = await asyncio.wait_for(reader.readexactly(63), SPEAKS_S)
        return await _stays(reader, Found.KEYED if said[11:31].rstrip(b"\0") == b"CURVE" else Found.PLAIN)
    except asyncio.TimeoutError:
        return Found.MUTE
    except (ConnectionError, asyncio.IncompleteReadError):
        return Found.CLOSES
    finally:
        writer.close()


async def _stays(reader: asyncio.StreamReader, found: Found) -> Found:
    """A head that has too many connections greets as well, and then closes this one."""
    try:
        await asyncio.wait_for(reader.readexactly(1), STAYS_S)
    except asyncio.TimeoutError:
        return found
    return Found.OTHER  # it is our turn
