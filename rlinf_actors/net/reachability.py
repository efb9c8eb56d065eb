"""Reachability checks: find out whether a process listens at an endpoint, and whether it is the head. Loop thread only.

`check` distinguishes a process that has ended from a network that is cut: agentds, drivers and workers call it when the
head, or a worker's node, is silent. `diagnose` and `HeadVerifier` find out why a connection to the head fails.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
from collections.abc import Callable, Iterable

from rlinf_actors.errors import WrongServerError
from rlinf_actors.exhaustion import explain
from rlinf_actors.net import host_names
from rlinf_actors.net.failure_detection import REACHABILITY_TIMEOUT_S
from rlinf_actors.net.host import split_address
from rlinf_actors.net.link import Diagnosis, Network, Reachability
from rlinf_actors.net.loop import Tasks

log = logging.getLogger(__name__)

CONNECT_S = 0.5
"""Seconds that `diagnose` waits for a connection."""
GREETING_S = 0.5
"""Seconds that a server may take to begin its ZeroMQ greeting, and again to finish it."""
STAYS_S = 0.2
"""Seconds for which `diagnose` waits after the greeting: a head with too many connections closes a new one by then."""
_LOCAL_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""Errors of a connection attempt that come from limits of this machine, and so say nothing about the network."""
_MARK = b"\xff" + bytes(8) + b"\x7f"
"""The first 10 bytes of a ZeroMQ greeting (ZMTP 3.1, RFC 37). The version (2 bytes), the mechanism's name (20) and 32
more bytes follow."""
_GREETING = _MARK + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


async def check(endpoint: str, timeout_s: float = REACHABILITY_TIMEOUT_S) -> Reachability:
    """Check whether a process listens at a tcp or ipc endpoint, by opening a connection and closing it again.

    The kernel accepts connections for a process that is stopped or busy, and refuses them for one that has ended. If
    this machine has no descriptor or port left for the check, the result is LISTENS: the network may be fine, and
    SILENT could make the caller end workers or calls.
    """
    try:
        if endpoint.startswith("ipc://"):
            _, writer = await asyncio.wait_for(asyncio.open_unix_connection(endpoint.removeprefix("ipc://")), timeout_s)
            writer.close()
        else:
            await _connect(*split_address(endpoint, "endpoint"), timeout_s)
    except (ConnectionRefusedError, FileNotFoundError):
        return Reachability.REFUSED
    except (OSError, asyncio.TimeoutError) as error:
        if endpoint.startswith("ipc://"):
            return Reachability.LISTENS  # perhaps its queue is full; there is no network between us
        if isinstance(error, OSError) and error.errno in _LOCAL_LIMITS:
            log.warning("cannot look whether %s is there: %s; it is taken for there", endpoint, explain(error))
            return Reachability.LISTENS
        log.debug("%s is out of reach: %s", endpoint, error or type(error).__name__)
        return Reachability.SILENT
    return Reachability.LISTENS


async def _connect(host: str, port: int, timeout_s: float) -> None:
    """Open a connection to the first address of *host* that accepts it, and close it again.

    Raises:
        OSError: no address accepts it; the error is that of the last address.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    found = await host_names.resolve(host, port, timeout_s)
    error = errno.EHOSTUNREACH
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as opening:
            opening.setblocking(False)
            error = opening.connect_ex(address)
            if error == errno.EINPROGRESS:
                await _writable(opening, until - loop.time())
                error = _outcome(opening)
        if not error:
            return
    raise OSError(error, os.strerror(error))


async def _writable(opening: socket.socket, timeout_s: float) -> None:
    """Return when the kernel has made the connection, or has failed to, or after *timeout_s* seconds."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    loop.add_writer(opening.fileno(), done.set)
    try:
        await asyncio.wait_for(done.wait(), timeout_s)
    except asyncio.TimeoutError:
        pass
    finally:
        loop.remove_writer(opening.fileno())


def _outcome(opening: socket.socket) -> int:
    """Return what the kernel says of an attempt to connect: 0 for success, else the number of the error.

    A process that gets no CPU notices late that its attempt has succeeded. So the kernel is asked, and not a clock.
    """
    polled = select.poll()
    polled.register(opening, select.POLLOUT)
    return opening.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if polled.poll(0) else errno.ETIMEDOUT


async def diagnose(endpoint: str) -> Diagnosis:
    """Find out which kind of program listens at an endpoint where the head should be, by the first bytes that it sends.

    For an ipc endpoint the result says only whether any program listens.
    """
    if endpoint.startswith("ipc://"):
        refused = await check(endpoint, CONNECT_S) is Reachability.REFUSED
        return Diagnosis.NOBODY if refused else Diagnosis.MUTE
    try:
        found = await host_names.resolve(*split_address(endpoint, "endpoint"), CONNECT_S)
        reader, writer = await asyncio.wait_for(_open(found), CONNECT_S)
    except ConnectionRefusedError:
        return Diagnosis.NOBODY
    except socket.gaierror:
        return Diagnosis.NAMELESS
    except (OSError, asyncio.TimeoutError):
        return Diagnosis.SILENT
    try:
        writer.write(_GREETING)
        if await asyncio.wait_for(reader.readexactly(1), GREETING_S) != _MARK[:1]:
            return Diagnosis.OTHER
        rest = await asyncio.wait_for(reader.readexactly(63), GREETING_S)
        try:
            await asyncio.wait_for(reader.readexactly(1), STAYS_S)
        except asyncio.TimeoutError:  # a head with too many connections greets too, and then closes this one
            return Diagnosis.KEYED if rest[11:31].rstrip(b"\0") == b"CURVE" else Diagnosis.PLAIN
        return Diagnosis.OTHER  # it spoke although it is our turn
    except asyncio.TimeoutError:
        return Diagnosis.MUTE
    except (ConnectionError, asyncio.IncompleteReadError):
        return Diagnosis.CLOSES
    finally:
        writer.close()


async def _open(found: Iterable[host_names.Address]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to the first of these addresses that accepts it."""
    refused: OSError = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for *_, address in found:
        try:
            return await asyncio.open_connection(*address[:2])
        except OSError as error:
            refused = error
    raise refused


SURE_S = 1.0
"""Seconds between a failed handshake and the diagnosis of the listener. A head that is just starting or ending looks
like another program for a moment."""
HANDSHAKES = 3
"""Number of failed handshakes after which a ZeroMQ server with keys counts as another server than the head. A program
that is no ZeroMQ server counts as another one after the first."""


class HeadVerifier:
    """Finds out why no message comes from the head: whether the program that listens at its address is the head at all.

    Args:
        network: diagnoses the endpoint.
        endpoint: the head's endpoint.
        on_wrong: called with an error when it is certain that another program listens there, because libzmq itself
            would retry for ever.
        explains: True if `why` may connect to the endpoint although no handshake has failed. False for agentds that
            were registered before: many would connect at one moment and fill the queue of a stopped head.
    """

    def __init__(
        self, network: Network, endpoint: str, on_wrong: Callable[[WrongServerError], None], explains: bool
    ) -> None:
        self._network = network
        self._endpoint = endpoint
        self._on_wrong = on_wrong
        self._explains = explains
        self._why = self._diagnosis = ""
        self._failed = 0
        self._tasks = Tasks()
        self._verifying: asyncio.Task[None] | None = None

    def failed(self, why: str, for_good: bool) -> None:
        """Record a failed handshake with the program at the head's address. *why* is the reason, for people.

        *for_good* is True if libzmq will not try again. If it is False, find out soon which program listens there.
        """
        self._why = why
        self._failed += 1
        if self._verifying is None and not for_good:
            self._verifying = self._tasks.start(self._verify(), "looking who listens at the head's address")

    def heard(self) -> None:
        """Record that a message of the head arrived, so the program at the address is the head."""
        self._why, self._diagnosis, self._failed, self._explains = "", "", 0, False

    def reset(self) -> None:
        """Forget all failed handshakes and stop the diagnosis, because the connection is being closed or made anew."""
        self._why, self._diagnosis, self._failed = "", "", 0
        if self._verifying is not None:
            self._verifying.cancel()
            self._verifying = None

    async def why(self) -> str:
        """Return a text for errors: why no message came from the head, and what the user can do."""
        if not self._why and self._explains:
            return (await self._network.diagnose(self._endpoint)).value
        return self._diagnosis or self._why or "is it running, and is the address right?"

    async def _verify(self) -> None:
        try:
            await asyncio.sleep(SURE_S)
            if self._failed:
                found = await self._network.diagnose(self._endpoint)
                self._diagnosis = "" if found is Diagnosis.KEYED else found.value
                if found is Diagnosis.OTHER or (found is Diagnosis.KEYED and self._failed >= HANDSHAKES):
                    text = f"this is not the head, at {self._endpoint}: {self._diagnosis or self._why}"
                    self._on_wrong(WrongServerError(text))
        finally:  # the next failed handshake starts another verification, also after a failure of this one
            if self._verifying is asyncio.current_task():
                self._verifying = None
