"""The seam between the transports (ZeroMQ, memory) and everything above them.

A message is a header (bytes that the layer above encodes) and parts (buffers that no transport looks into). Messages
that leave for one peer in one turn of the loop travel as one chunk. Order is kept for each pair of sender and receiver.
A transport never reports that a peer is gone: the head does.
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
"""(why, for good); on the network's loop: a handshake over TCP failed. For good: the link does not try again."""
OnReset = Callable[[], None]
"""On the network's loop: a connection over TCP was lost and is there again. Messages in flight may be lost."""
OnMessage = Callable[[bytes, bytes, "list[Buffer]"], None]
"""(peer, header, parts); on the network's loop. *peer* is b"" on a Link."""
OnFailed = Callable[[bytes, InternalError], object]
"""(peer, error); on the network's loop: OnMessage raised, and this process goes on. It fails what the last message from
the peer belonged to."""


def secret_identity(name: str) -> bytes:
    """Return the identity by which a listener is to know this process: *name* and a part that nobody can guess.

    A ROUTER lets any peer that states an identity take over its connection, and with it what is sent there.
    """
    return f"{name}#{secrets.token_hex(8)}".encode()


def peer_name(identity: bytes) -> str:
    """Return the part of an identity that logs and errors may show: everything before its secret part."""
    return identity.partition(b"#")[0].decode(errors="replace")


class Reachability(enum.Enum):
    """The result of a reachability check of an endpoint."""

    LISTENS = "listens"
    REFUSED = "refused"
    SILENT = "silent"


class Diagnosis(enum.Enum):
    """What listens at an endpoint, by the first bytes of a connection; the values are for people."""

    NOBODY = "nobody listens there: start the head, or correct the address"
    NAMELESS = "its name cannot be resolved: is it spelt right, and does this machine's name service know it?"
    SILENT = "its machine does not answer: is it on, is the address right, does a firewall drop packets?"
    MUTE = "something takes connections there and says nothing: a head that stands still, or another program"
    CLOSES = "something there closes each connection at once: a head that has too many, or another program"
    OTHER = "another program listens there, not a head"
    KEYED = "something that wants keys listens there and does not answer: a head that is busy or stands still"
    PLAIN = "something without keys listens there and does not answer: a head that is busy, or another program"


class Listener(Protocol):
    """A socket that others connect to.

    Attributes:
        on_unreachable: called on the loop with a peer that something was sent to and that is not connected, if set.
    """

    on_unreachable: Callable[[bytes], None] | None

    def bind(self, endpoint: str) -> str:
        """Listen; return the endpoint with the actual port. Raises ConfigError or OSError."""

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        """Send to a connected peer; a message to a peer that is gone is dropped. Any thread.

        *now* hands the message to the socket on the calling thread if nothing is queued before it. That saves a
        wake-up of the loop's thread and costs the batching.
        """

    def member_of(self, peer: bytes) -> Member | None:
        """Return the member behind this peer, by the key of its connection; LOCAL where no key is needed. Loop thread.

        None: its key is not admitted any more.
        """

    def close(self, linger_ms: int = 0) -> None:
        """Stop listening; what is not sent after *linger_ms* milliseconds is dropped. Loop thread only. Idempotent."""


class Link(Protocol):
    """A connection to one listener. It reconnects by itself."""

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        """Send as Listener.send does. Messages wait for a listener that is not there yet."""

    def close(self, linger_ms: int = 0) -> None:
        """Close; what is not sent after *linger_ms* milliseconds is dropped. Loop thread only. Idempotent."""


class Network(Protocol):
    """Makes listeners and links on one event loop.

    Attributes:
        forked: True in a fork of the process that made it: nothing can be sent then.
        memory: the shared memory that this process lends on its machine, None to send everything.
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

        Args:
            on_message: takes what arrives.
            max_bytes: a longer frame ends its connection; -1 for no limit.
            gate: decides whom the TCP side admits if it is a CURVE server.
            on_failed: see net.loop's `handling_failed`.
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
        """Return a link to *endpoint*.

        Args:
            endpoint: the listener's.
            identity: how the listener knows this link; unique per process and purpose (`secret_identity`).
            on_message: takes what arrives.
            token: the job's, which proves membership to a worker; "" for the head, where this process's key does.
            on_rejected, on_reset, on_failed: see above.
        """

    async def check_reachability(self, endpoint: str, timeout_s: float = REACHABILITY_TIMEOUT_S) -> Reachability:
        """Check whether anything listens at *endpoint*; see net.reachability. Loop thread."""

    async def diagnose(self, endpoint: str) -> Diagnosis:
        """Find out what listens at *endpoint*; see net.reachability. Loop thread."""

    def soon(self, function: Callable[[], object]) -> None:
        """Run *function* on the loop soon. Any thread, finalizers too; nothing happens once the loop is closed."""

    def close(self) -> None:
        """Close every socket made here. Loop thread only."""
