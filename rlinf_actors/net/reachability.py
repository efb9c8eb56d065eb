"""Whether anything listens at an endpoint, which tells a process that is gone from a network that is cut, and what.

Whether what listens at the head's address is the head, where nothing is heard of it. Loop thread only.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from rlinf_actors.errors import WrongServerError
from rlinf_actors.exhaustion import explain
from rlinf_actors.net.failure_detection import REACHABILITY_TIMEOUT_S
from rlinf_actors.net.host import split_address
from rlinf_actors.net.link import Diagnosis, Network, Reachability
from rlinf_actors.net.loop import Tasks

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


async def look_at(endpoint: str, timeout_s: float = REACHABILITY_TIMEOUT_S) -> Reachability:
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
        return Reachability.REFUSED
    except (OSError, asyncio.TimeoutError) as error:
        if endpoint.startswith("ipc://"):
            return Reachability.LISTENS  # its queue is full, perhaps; no network lies between us
        if isinstance(error, OSError) and error.errno in _OF_THIS_MACHINE:
            log.warning("cannot look whether %s is there: %s; it is taken for there", endpoint, explain(error))
            return Reachability.LISTENS  # a cut would end all that waits for it
        log.debug("%s is out of reach: %s", endpoint, error or type(error).__name__)
        return Reachability.SILENT
    writer.close()
    return Reachability.LISTENS


async def diagnose(endpoint: str) -> Diagnosis:
    """Find out who listens at *endpoint*, by the first bytes of a connection. Cancelling gives up.

    Args:
        endpoint: of ZeroMQ, tcp or ipc; of the latter only whether anybody does.
    """
    if endpoint.startswith("ipc://"):
        return Diagnosis.NOBODY if await look_at(endpoint, ANSWERS_S) is Reachability.REFUSED else Diagnosis.MUTE
    try:
        opening = asyncio.open_connection(*split_address(endpoint, "endpoint"))
        reader, writer = await asyncio.wait_for(opening, ANSWERS_S)
    except ConnectionRefusedError:
        return Diagnosis.NOBODY
    except socket.gaierror:
        return Diagnosis.NAMELESS
    except (OSError, asyncio.TimeoutError):
        return Diagnosis.SILENT
    try:
        writer.write(_GREETING)
        if await asyncio.wait_for(reader.readexactly(1), SPEAKS_S) != _MARK[:1]:
            return Diagnosis.OTHER
        said = await asyncio.wait_for(reader.readexactly(63), SPEAKS_S)
        return await _stays(reader, Diagnosis.KEYED if said[11:31].rstrip(b"\0") == b"CURVE" else Diagnosis.PLAIN)
    except asyncio.TimeoutError:
        return Diagnosis.MUTE
    except (ConnectionError, asyncio.IncompleteReadError):
        return Diagnosis.CLOSES
    finally:
        writer.close()


async def _stays(reader: asyncio.StreamReader, found: Diagnosis) -> Diagnosis:
    """A head that has too many connections greets as well, and then closes this one."""
    try:
        await asyncio.wait_for(reader.readexactly(1), STAYS_S)
    except asyncio.TimeoutError:
        return found
    return Diagnosis.OTHER  # it is our turn


SURE_S = 1.0
"""For how long handshakes must fail before whoever listens is looked at: one that ends in a handshake looks the same,
and so does a head that is started at that moment."""
HANDSHAKES = 3
"""As many must have failed where a head listens; another program is no head at once."""


class Doubt:
    """What is known of the other end of a connection that does not come about.

    Args:
        network: to look with.
        endpoint: of the head.
        on_other: called with the error when it is certain that another listens there; libzmq tries for ever.
        explains: whether to look where nothing was ever heard, for `why`; not where many would at one moment: what
            looks at a head that stands still fills its queue of connections.
    """

    def __init__(
        self, network: Network, endpoint: str, on_other: Callable[[WrongServerError], None], explains: bool
    ) -> None:
        self._network = network
        self._endpoint = endpoint
        self._on_other = on_other
        self._explains = explains
        self._why = self._seen = ""
        self._failed = 0
        self._tasks = Tasks()
        self._looking: asyncio.Task[None] | None = None

    def failed(self, why: str, for_good: bool) -> None:
        """A handshake has failed; *for_good*: and is not tried again."""
        self._why = why
        self._failed += 1
        if self._looking is None and not for_good:
            self._looking = self._tasks.start(self._look(), "looking who listens at the head's address")

    def heard(self) -> None:
        """The head has said something."""
        self._why, self._seen, self._failed, self._explains = "", "", 0, False

    def again(self) -> None:
        """The connection is made anew, or closed for good."""
        self._why, self._seen, self._failed = "", "", 0
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def why(self) -> str:
        """Why nothing was heard, as far as can be said, and what to do."""
        if not self._why and self._explains:
            return (await self._network.diagnose(self._endpoint)).value
        return self._seen or self._why or "is it running, and is the address right?"

    async def _look(self) -> None:
        try:
            await asyncio.sleep(SURE_S)
            if self._failed:
                found = await self._network.diagnose(self._endpoint)
                self._seen = "" if found is Diagnosis.KEYED else found.value
                if found is Diagnosis.OTHER or (found is Diagnosis.KEYED and self._failed >= HANDSHAKES):
                    said = f"this is not the head, at {self._endpoint}: {self._seen or self._why}"
                    self._on_other(WrongServerError(said))
        finally:  # also where it fails: the next handshake that does looks again
            if self._looking is asyncio.current_task():
                self._looking = None
