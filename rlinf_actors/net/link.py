"""The interface between the transports (`net.zmq_network`, and in tests a twin without sockets) and everything above.

A message is a header (bytes that the layer above encodes) and parts (buffers that no transport looks into). Messages to
one peer that are sent in one turn of the loop travel as one chunk. Order is kept for each pair of sender and receiver.
A transport never reports that a peer is dead: the head does.
"""

from __future__ import annotations

import enum
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from rlinf_actors.errors import InternalError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.failure_detection import REACHABILITY_TIMEOUT_S
from rlinf_actors.security.members import Gate, Member

if TYPE_CHECKING:
    from rlinf_actors.net.bulk_handshake import BulkTransport
    from rlinf_actors.net.shared_memory import Arena

OnRejected = Callable[[str, bool], None]
"""Called with (why, for good) on the network's loop when a handshake over TCP failed. If "for good" is True, the link
does not try again."""
OnReset = Callable[[], None]
"""Called on the network's loop when a lost TCP connection was made again. Messages in flight may be lost."""
OnMessage = Callable[[bytes, bytes, "list[Buffer]"], None]
"""Called with (peer, header, parts) of each message, on the network's loop. *peer* is b"" on a Link."""
OnAnyThread = Callable[[bytes, bytes, "list[Buffer]"], bool]
"""Called as OnMessage, on the thread that has read the message. Handles the message and returns True if that is safe on
any thread; else changes nothing and returns False, and OnMessage gets the message on the loop. Messages of one link are
handled in order, never two at once."""
OnFailed = Callable[[bytes, InternalError], object]
"""Called with (peer, error) after OnMessage or OnAnyThread raised, on the same thread, if this process continues. It
must fail the operation that the peer's last message belonged to."""


_identities = itertools.count(1)


def secret_identity(name: str) -> bytes:
    """Return a new identity by which a listener knows a connection of this process: *name* and a secret random part.

    The secret part is needed because a ROUTER socket lets any peer that knows an identity take over the connection, and
    so receive the messages sent to that identity. A process that replaces a connection gives the new one an identity of
    its own: if both come late to a starting listener, in the wrong order, libzmq would close the newer one.
    """
    return f"{name}#{secrets.token_hex(8)}.{next(_identities)}".encode()


def is_older(identity: bytes, other: bytes) -> bool:
    """Return True if a process has made *identity* before *other*. The caller knows that one process has made both."""
    first, second = identity.rpartition(b".")[2], other.rpartition(b".")[2]
    return first.isdigit() and second.isdigit() and int(first) < int(second)


def peer_name(identity: bytes) -> str:
    """Return the name in *identity* without its secret part, for logs and errors."""
    return identity.partition(b"#")[0].decode(errors="replace")


class LogThrottle:
    """Counts dropped messages and says which of them to log, so that malformed messages cannot fill the log.

    Attributes:
        count: number of messages dropped so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> bool:
        """Count a dropped message. Return True if the caller should log it: only the 1st, 2nd, 4th, 8th, 16th, ... is
        logged.
        """
        self.count += 1
        return self.count & (self.count - 1) == 0


class Reachability(enum.Enum):
    """Result of a reachability check.

    LISTENS: a process listens at the endpoint. REFUSED: the machine answered, but no process listens. SILENT: the
    machine did not answer.
    """

    LISTENS = "listens"
    REFUSED = "refused"
    SILENT = "silent"


class Diagnosis(enum.Enum):
    """What kind of program, if any, listens at the address where the head should be. The values
    are texts for people.
    """

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
        on_unreachable: if not None, called on the loop with a peer's identity after a message to that peer was dropped
            because the peer is not connected.
        on_drained: if not None, called on the loop after the messages that arrived together, before what their handlers
            have sent leaves.
        on_ended: if not None, called on the loop when the stream of a peer has ended, after all that came by it.
    """

    on_unreachable: Callable[[bytes], None] | None
    on_drained: Callable[[], None] | None
    on_ended: Callable[[bytes], None] | None

    def __contains__(self, peer: bytes) -> bool:
        """Return True if *peer* has a stream whose end `on_ended` will report. ZeroMQ reports no ends. Any thread."""

    def bind(self, endpoint: str) -> str:
        """Listen on *endpoint*. Return the endpoint with the port that is really used.

        Raises:
            ConfigError: the endpoint must not be used without keys, and this process has none.
            OSError: the endpoint cannot be bound.
        """

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        """Send a message to a connected peer; drop it if the peer is not connected. Any thread.

        Args:
            peer: identity of the peer.
            header: the message's header.
            parts: the message's parts.
            now: True to send on the calling thread, with what is queued before. That is faster for one message, and
                slower for many, because they are then not sent together.
        """

    def admit(self, peer: bytes) -> None:
        """Accept large messages from *peer* from now on, because it has joined. Loop thread."""

    def member_of(self, peer: bytes) -> Member | None:
        """Return the member that a peer is, by the key that its connection proved. Loop thread.

        The result is LOCAL if the connection needs no key, and None if *peer* is unknown or its key is no longer
        admitted.
        """

    def address_of(self, peer: bytes) -> str:
        """Return from where a peer came first: an IP address, or ``uid 1000, pid 4711`` at a unix socket; "" if that is
        unknown. Loop thread.
        """

    def close(self, linger_ms: int = 0) -> None:
        """Stop listening. Messages not sent within *linger_ms* milliseconds are dropped. Loop thread. Idempotent."""


class Link(Protocol):
    """A connection of this process to one listener. It reconnects by itself."""

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        """Send a message to the listener; keep it until the listener can be reached. Any thread.

        Args:
            header: the message's header.
            parts: the message's parts.
            now: True to send on the calling thread, with what is queued before. That is faster for one message, and
                slower for many, because they are then not sent together.
        """

    def stands(self) -> bool:
        """Return True if the connection is made and the kernel says that all that was sent has arrived, so that a
        listener that does not answer, or does not finish the handshake, is busy or stopped. Loop thread.

        From then on the kernel also asks the listener's machine every few seconds whether the connection stands; if it
        does not, the connection is lost and made again. False if the kernel cannot tell.
        """

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection. Messages not sent within *linger_ms* milliseconds are dropped.
        Loop thread. Idempotent.
        """


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a link (`Network.link`).

    Attributes:
        token: for a link to a worker the token of this process's job, which proves that both are in one job; "" for a
            link to the head, which is opened with this process's own key.
        to: name of the worker at the endpoint, ``group:rank``; "" if the listener is no worker's.
        on_rejected: called on the loop if the listener rejected the connection.
        on_reset: called on the loop when a lost connection was made again; messages may have been lost.
        on_failed: called after `on_message` or `on_any_thread` raised an unexpected exception.
        on_any_thread: handles messages on waiting threads too (`net.reading`); None if only the loop reads.
    """

    token: str = ""
    to: str = ""
    on_rejected: OnRejected | None = None
    on_reset: OnReset | None = None
    on_failed: OnFailed | None = None
    on_any_thread: OnAnyThread | None = None


PLAIN = LinkOptions()
"""The options of a link that has only messages."""


class HeldBack:
    """Connections whose messages wait until the layer above releases them. Loop thread only.

    Attributes:
        peers: their identities.
        on_release: called with the identity of a connection that is not held back any more.
        on_work: called with a public key, or with the identity of a connection without one, and the seconds that the
            layer above has worked for it since it took the message.
    """

    def __init__(self) -> None:
        self.peers: set[bytes] = set()
        self.on_release: Callable[[bytes], None] = lambda peer: None
        self.on_work: Callable[[str | bytes, float], None] = lambda holder, seconds: None

    def hold(self, peer: bytes) -> None:
        self.peers.add(peer)

    def release(self, peer: bytes) -> None:
        self.peers.discard(peer)
        self.on_release(peer)


class Verbs(msgspec.Struct, frozen=True):
    """How the layer above reads control messages that were not decoded yet.

    Attributes:
        verb_of: returns the tag of a message.
        stops: tags of the messages that pass before everything else.
        urgent: tags of the messages that pass before those of all other connections.
        refuse: called with peer, message and reason for a request that is refused before it is decoded.
        beats: tags of the messages that also pass while their connection is held back.
        held_back: the connections whose messages wait.
    """

    verb_of: Callable[[bytes], bytes]
    stops: frozenset[bytes]
    urgent: frozenset[bytes]
    refuse: Callable[[bytes, bytes, str], object]
    beats: frozenset[bytes]
    held_back: HeldBack


class Network(Protocol):
    """Makes the listeners and links of one process on one event loop.

    Attributes:
        forked: True in a forked child of the process that made this network. The child cannot send by it.
        memory: this process's shared memory, by which it lends large parts to processes on its machine; None to send
            all parts in messages.
        bulk: this process's bulk streams, which carry large parts between nodes; None to send all parts in messages.
    """

    forked: bool
    memory: Arena | None
    bulk: BulkTransport | None

    def listener(
        self,
        on_message: OnMessage,
        *,
        max_bytes: int = -1,
        gate: Gate | None = None,
        on_failed: OnFailed | None = None,
        on_any_thread: OnAnyThread | None = None,
        verbs: Verbs | None = None,
    ) -> Listener:
        """Return a new listener. The caller binds it.

        Args:
            on_message: called on the loop with each message.
            max_bytes: a longer frame ends the connection that it came by; -1 for no limit.
            gate: decides which keys are admitted on TCP endpoints that need keys.
            on_failed: called after *on_message* or *on_any_thread* raised an unexpected exception.
            on_any_thread: handles messages on waiting threads too (`net.reading`); None if only the loop reads.
            verbs: reads control messages, for the head's listener, which shares its time fairly among members
                (`net.fair_inbox`); None for others.
        """

    def link(
        self,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        options: LinkOptions = PLAIN,
    ) -> Link:
        """Return a link to the listener at *endpoint*.

        Args:
            endpoint: the listener's endpoint.
            identity: the name by which the listener knows this link (`secret_identity`).
            on_message: called on the loop with each message.
            options: the peer, and what is called of the link's events.
        """

    async def check_reachability(self, endpoint: str, timeout_s: float = REACHABILITY_TIMEOUT_S) -> Reachability:
        """Check whether a process listens at *endpoint*, within *timeout_s* seconds. Loop thread."""

    async def diagnose(self, endpoint: str) -> Diagnosis:
        """Find out which kind of program listens at *endpoint*, where the head should be. Loop thread."""

    def soon(self, function: Callable[[], object]) -> None:
        """Run *function* on the loop soon. After the loop was closed, do nothing. Any thread, also from finalizers."""

    def close(self) -> None: ...
