"""The interface between the transports (`net.zmq_network`, and in tests a twin without sockets) and everything above.

A message is a header (bytes that the layer above encodes) and parts (buffers that no transport looks into). Messages to
one peer that are sent in one turn of the loop travel as one chunk. Order is kept for each pair of sender and receiver.
A transport never reports that a peer is dead: the head does.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from rlinf_actors.errors import InternalError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.failure_detection import REACHABILITY_TIMEOUT_S
from rlinf_actors.security.members import Gate, Member

if TYPE_CHECKING:
    from rlinf_actors.net.shared_memory import Arena

OnRejected = Callable[[str, bool], None]
"""Called with (why, for good) on the network's loop when a handshake over TCP failed. If "for good" is True, the link
does not try again."""
OnReset = Callable[[], None]
"""Called on the network's loop when a lost TCP connection was made again. Messages in flight may be lost."""
OnMessage = Callable[[bytes, bytes, "list[Buffer]"], None]
"""Called with (peer, header, parts) of each message, on the network's loop. *peer* is b"" on a Link."""
OnFailed = Callable[[bytes, InternalError], object]
"""Called with (peer, error) on the network's loop after OnMessage raised, if this process continues. It must fail the
operation that the peer's last message belonged to."""


def secret_identity(name: str) -> bytes:
    """Return a new identity for this process at a listener: *name* and a random part that cannot be guessed.

    A ROUTER lets any peer that knows an identity take over its connection, and so receive the messages sent to it.
    """
    return f"{name}#{secrets.token_hex(8)}".encode()


def peer_name(identity: bytes) -> str:
    """Return the part of an identity that logs and errors may show: everything before its secret part."""
    return identity.partition(b"#")[0].decode(errors="replace")


class LogThrottle:
    """Counts dropped messages in `count`, and logs ever fewer, so that malformed bytes cannot fill the log."""

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> bool:
        """Count a dropped message. Return True if it must be logged: the 1st, 2nd, 4th, 8th, 16th, ..."""
        self.count += 1
        return self.count & (self.count - 1) == 0


class Reachability(enum.Enum):
    """Result of a reachability check: a process listens, the machine refused the connection, or nothing answered."""

    LISTENS = "listens"
    REFUSED = "refused"
    SILENT = "silent"


class Diagnosis(enum.Enum):
    """The kind of program at an endpoint, by the first bytes of a connection. The values are texts for people."""

    NOBODY = "nobody listens there: start the head, or correct the address"
    NAMELESS = "its name cannot be resolved: is it spelt right, and does this machine's name service know it?"
    SILENT = "its machine does not answer: is it on, is the address right, does a firewall drop packets?"
    MUTE = "something takes connections there and says nothing: a head that stands still, or another program"
    CLOSES = "something there closes each connection at once: a head that has too many, or another program"
    OTHER = "another program listens there, not a head"
    KEYED = "something that wants keys listens there and does not answer: a head that is busy or stands still"
    PLAIN = "something without keys listens there and does not answer: a head that is busy, or another program"


class Listener(Protocol):
    """A socket that peers connect to.

    Attributes:
        on_unreachable: if set, called on the loop with a peer that a message was sent to and that is not connected.
    """

    on_unreachable: Callable[[bytes], None] | None

    def bind(self, endpoint: str) -> str:
        """Listen on *endpoint*. Return the endpoint with the actual port. Raises ConfigError or OSError."""

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        """Send a message to a connected peer; drop it if the peer is not connected. Any thread.

        With *now*, the calling thread hands the message to the socket if no message is queued before it. That saves a
        wake-up of the loop's thread, but the message is not batched with others.
        """

    def member_of(self, peer: bytes) -> Member | None:
        """Return the member behind a peer, by the key of its connection. Loop thread.

        LOCAL if no key is needed; None if the peer is unknown or its key is no longer admitted.
        """

    def close(self, linger_ms: int = 0) -> None:
        """Stop listening. Messages not sent within *linger_ms* milliseconds are dropped. Loop thread. Idempotent."""


class Link(Protocol):
    """A connection to one listener. It reconnects by itself."""

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        """Send a message as `Listener.send` does. While the listener is not there, messages wait."""

    def close(self, linger_ms: int = 0) -> None:
        """Close. Messages not sent within *linger_ms* milliseconds are dropped. Loop thread. Idempotent."""


class Network(Protocol):
    """Makes listeners and links on one event loop.

    Attributes:
        forked: True in a forked child of the process that made this network. Nothing can be sent there.
        memory: the shared memory that this process lends to others on its machine, None to send all parts in messages.
    """

    forked: bool
    memory: Arena | None

    def listener(
        self,
        on_message: OnMessage,
        *,
        max_bytes: int = -1,
        gate: Gate | None = None,
        on_failed: OnFailed | None = None,
    ) -> Listener:
        """Return a listener that is not bound yet.

        A frame longer than *max_bytes* (-1: no limit) ends its connection. *gate* decides which keys are admitted over
        TCP, if the listener is a CURVE server.
        """

    def link(
        self,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        *,
        token: str = "",
        on_rejected: OnRejected | None = None,
        on_reset: OnReset | None = None,
        on_failed: OnFailed | None = None,
    ) -> Link:
        """Return a link to the listener at *endpoint*, where *identity* (`secret_identity`) names this link.

        *token* is the job's token, which proves membership to a worker; "" for the head, where this process's key does.
        """

    async def check_reachability(self, endpoint: str, timeout_s: float = REACHABILITY_TIMEOUT_S) -> Reachability:
        """Check whether a process listens at *endpoint* (`net.reachability.check`). Loop thread."""

    async def diagnose(self, endpoint: str) -> Diagnosis:
        """Find out which kind of program listens at *endpoint* (`net.reachability.diagnose`). Loop thread."""

    def soon(self, function: Callable[[], object]) -> None:
        """Run *function* on the loop soon. Any thread, also from finalizers. Does nothing after the loop was closed."""

    def close(self) -> None: ...
