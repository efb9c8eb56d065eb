"""Bulk: large message parts travel between nodes by several TCP connections beside the link, which is ZeroMQ.

Theory of operation. `BulkLink` is the bulk side of one link, at either end. If a message has large parts, `pack` puts
an Announce in the place of its header, and the parts become a *transfer*: pieces that the streams of the link's
*session* carry in any order, each straight from the sender's memory to its place at the receiver. The receiver keeps
the message, and all messages behind it, until the transfer is complete, so the order of the link stays. It then
reports TransferDone, and the sender forgets the parts.

The session. A worker listens on a bulk port beside its TCP port. The process that has the link opens a session when
either end has a first transfer: it sends a new secret by the link (Open), and connects. So who may connect is decided
by the link (CURVE and the job's token). Both ends of each connection prove that they know the secret, before any other
byte is accepted (`net.bulk_handshake`), and if the job has keys, all pieces are encrypted (`net.bulk_framing`).

Failures. If a session cannot be opened, or one of its streams fails, both ends end it (Ended), and send every transfer
that is not done (TransferDone) by the link itself (Inline), as if there were no bulk streams. After RETRY_S the next
transfer may open a session again. When the link ends, its transfers end with it.

Idle sessions. After IDLE_S without a transfer, the process that has the link ends the session (Ended with the text
IDLE), and the listener closes the streams. The next transfer opens a new session.

Threads: `pack` on any thread; `place`, `received` and `next_piece` on the engine's threads; the rest on the loop's.
"""

from __future__ import annotations

import collections
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Union

import msgspec
from msgspec import Meta

from rlinf_actors import counters
from rlinf_actors.errors import InternalError, RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import bulk_framing as framing
from rlinf_actors.net.bulk_framing import PieceHeader
from rlinf_actors.net.bulk_streams import BulkStream
from rlinf_actors.net.bulk_transfers import Incoming, Outgoing, TargetFor
from rlinf_actors.wire.bounds import Handle, Ids, Text
from rlinf_actors.wire.protocol import checked

if TYPE_CHECKING:
    from rlinf_actors.net.bulk_handshake import BulkTransport

log = logging.getLogger(__name__)

MARK = b"\xc0"
"""First byte of the messages of this module. No header begins with this byte, which is MessagePack's nil."""
KEYED_FROM = 1 << 20
"""Bytes of a message from which its large parts travel by bulk streams, if they are encrypted: CURVE takes longer."""
PLAIN_FROM = 32 << 20
"""The same without keys: from here the link must receive into new memory, and takes longer (measured)."""
LARGE = 4 << 10
"""Size in bytes from which a part of such a message travels by bulk streams."""
RETRY_S = 60.0
"""Seconds without bulk streams after they have failed on a link."""
IDLE_S = 60.0
"""Seconds without a transfer after which the streams of a link are closed."""
IDLE = "idle"
"""The text of an Ended that reports no failure."""
PLACE_S = 10.0
"""Seconds in which the message of a piece must arrive; it was sent before the piece, on another connection."""
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Most bytes of the transfers that arrive on a link at a time: the machine's memory."""
OVERTAKEN = 1000
"""Most transfers whose messages may arrive after that of a later transfer: one for each thread that sends at once."""

_Index = Annotated[int, Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of the messages of this module. They follow MARK, in the place of a message's header."""


class Announce(_Message, frozen=True, tag=0):
    """A message with this `header`. For each row (index, size), its part `index` of `size` bytes is in the transfer."""

    transfer: _Index
    rows: Ids[tuple[_Index, Annotated[int, Meta(ge=1)]]]
    header: Annotated[bytes, Meta(max_length=1 << 24, title="header", description="As a control message.")]


class Open(_Message, frozen=True, tag=1):
    """The sender connects to the receiver's bulk port, and proves there that it knows `secret`."""

    session: Annotated[
        bytes,
        Meta(
            min_length=framing.SESSION, max_length=framing.SESSION, title="session", description="Its length is fixed."
        ),
    ]
    secret: Annotated[
        bytes,
        Meta(min_length=framing.SECRET, max_length=framing.SECRET, title="secret", description="Its length is fixed."),
    ]
    keyed: bool


class Ended(_Message, frozen=True, tag=2):
    """The session has ended, b"" for one that was never opened. `why` is for people."""

    session: Handle
    why: Text


class TransferDone(_Message, frozen=True, tag=3):
    """These transfers of the receiver are complete."""

    transfers: Ids[int]


class Inline(_Message, frozen=True, tag=4):
    """The parts of this message are those of the transfer."""

    transfer: int


AnyMessage = Union[Announce, Open, Ended, TransferDone, Inline]
_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes | memoryview], AnyMessage] = checked(AnyMessage, "a message about bulk streams")


class BulkLink:
    """The bulk side of one link, at the process that has the link or at the listener.

    Args:
        transport: the bulk streams of this process.
        name: name of the peer, for logs.
        send: sends a header and parts by the link; any thread.
        deliver: handles a message that has arrived with all its parts, on the loop; returns nothing.
        failed: called on the loop after *deliver* raised an exception, if this process continues.
        address: IP address and bulk port of the listener; None at the listener.
        target_for: says which receive has memory for a large part that arrives. Else it arrives in memory of its own.
    """

    def __init__(
        self,
        transport: BulkTransport,
        name: str,
        send: Callable[[bytes, Sequence[Buffer]], object],
        deliver: Callable[[bytes, list[Buffer]], None],
        failed: Callable[[InternalError], object],
        address: tuple[str, int] | None = None,
        target_for: TargetFor = lambda header, parts, size, again: None,
    ) -> None:
        self._target_for = target_for
        self._transport = transport
        self.name = name
        self._send = send
        self._deliver = deliver
        self._failed = failed
        self._address = address
        self._lock = threading.Lock()
        self._session = b""
        self._streams: list[BulkStream] = []
        self._retired: list[BulkStream] = []  # of an idle session, until the listener closes them
        self._failed_at: float | None = None
        self._closed = False
        self._numbers = 0
        self._outgoing: dict[int, Outgoing] = {}  # not acknowledged yet
        self._queue: collections.deque[Outgoing] = collections.deque()
        self._next: PieceHeader | None = None  # first piece of the queue
        self._incoming: dict[int, Incoming] = {}
        self._arriving = 0  # bytes of these transfers
        self._announced = 0  # highest number
        self._overtaken: set[int] = set()  # lower numbers whose messages have not arrived
        self._by_link: dict[int, list[Buffer]] = {}  # parts that came by the link before their message
        self._early: set[int] = set()  # numbers of transfers whose pieces came before their messages
        self._held: collections.deque[tuple[bytes, list[Buffer], Incoming | None]] = collections.deque()

    # --- out; any thread ---

    def pack(self, header: bytes, parts: Sequence[Buffer]) -> tuple[bytes, Sequence[Buffer]]:
        """Return the header and parts to send by the link for a message. Its large parts travel by the streams."""
        sizes = [len(part) if type(part) is bytes else memoryview(part).nbytes for part in parts]
        if sum(sizes) < self._transport.bulk_from or self._transport.closed:
            return header, parts
        rows = [(index, size) for index, size in enumerate(sizes) if size >= LARGE]
        if not rows:
            return header, parts
        with self._lock:
            if self._closed or not self._usable():
                return header, parts
            self._numbers += 1
            number = self._numbers
            transfer = self._outgoing[number] = Outgoing(number, [parts[index] for index, _ in rows])
            self._queue.append(transfer)
            self._fill()
            streams = self._streams[: -(-sum(sizes) // framing.PIECE)]
        self._open()
        for stream in streams:
            stream.kick()
        sent = list(parts)
        for index, size in rows:
            sent[index] = b""
            counters.sent("bulk", size)
        return MARK + _encode(Announce(number, rows, header)), sent

    def _usable(self) -> bool:
        return self._failed_at is None or time.monotonic() - self._failed_at > RETRY_S

    def _open(self) -> bool:
        """Open a session if there is none. Only the process that has the link does that.

        Return False if there was one a moment ago, which has failed.
        """
        if self._address is None:
            return True
        with self._lock:
            if self._session or self._closed:
                return True
            if not self._usable():
                return False
            session = self._session = secrets.token_bytes(framing.SESSION)
            self._failed_at = None
        secret = secrets.token_bytes(framing.SECRET)
        self._send(MARK + _encode(Open(session, secret, self._transport.keyed)), ())
        self._transport.connect(self, self._address, session, secret)
        self._transport.later(IDLE_S, partial(self._end_if_idle, session, (0, 0)))
        return True

    def _end_if_idle(self, session: bytes, seen: tuple[int, int]) -> None:
        """End *session* if it had no transfer since *seen*, else look again later. Loop thread only."""
        with self._lock:
            if session != self._session or self._closed:
                return
            now = (self._numbers, self._announced)
            idle = now == seen and not (self._outgoing or self._incoming or self._early)
            if idle:
                self._session = b""
                # the listener closes them: at its end, a closed stream before the Ended would look like a failure
                self._retired, self._streams = self._streams, []
        if idle:
            self._transport.forget(session)
            self._send(MARK + _encode(Ended(session, IDLE)), ())
        else:
            self._transport.later(IDLE_S, partial(self._end_if_idle, session, now))

    def _fill(self) -> None:
        while self._next is None and self._queue:
            self._next = next(self._queue[0].pieces, None)
            if self._next is None:
                self._queue.popleft()

    # --- the streams; engine's threads ---

    def next_piece(self, stream: BulkStream) -> tuple[PieceHeader, list[Buffer]] | None:
        with self._lock:
            header = self._next
            if header is None or stream not in self._streams:  # a stream of an ended session must take none
                return None
            buffers = self._queue[0].buffers(header)
            self._next = None
            self._fill()
        return header, buffers

    def has_pieces(self) -> bool:
        return self._next is not None

    def place(self, header: PieceHeader) -> AbstractContextManager[memoryview] | None:
        with self._lock:
            incoming = self._incoming.get(header.transfer)
            if incoming is not None:
                incoming.pieces.check(header)
                return incoming.place(header)
            if not self._expects(header.transfer):
                raise RemoteWireError(f"a piece of transfer {header.transfer}, which is complete")
            first = header.transfer not in self._early
            self._early.add(header.transfer)
        if first:
            self._transport.later(PLACE_S, lambda: self._check_place(header.transfer))
        return None

    def _check_place(self, transfer: int) -> None:
        with self._lock:
            late, session = transfer in self._early, self._session
        if late:
            self.end(f"the message of a transfer did not arrive within {PLACE_S:g} s", session)

    def received(self, header: PieceHeader) -> None:
        with self._lock:
            incoming = self._incoming.get(header.transfer)
            if incoming is None:
                return  # it came by the link meanwhile
            incoming.pieces.add(header)
            if not incoming.pieces.complete:
                return
            incoming.complete = True
            del incoming  # its memory is not to wait for this thread
        self._transport.soon(lambda: self._completed(header.transfer))

    def ready(self, stream: BulkStream, session: bytes) -> None:
        """Use an authenticated connection of *session*."""
        with self._lock:
            current = session == self._session and not self._closed
            if current:
                self._streams.append(stream)
        if current:
            stream.start(self._transport.engine)
        else:
            stream.close()

    def stream_ended(self, stream: BulkStream, why: str) -> None:
        with self._lock:
            session = self._session if stream in self._streams else None
        if session is not None:
            self.end(why, session)

    def end(self, why: str, session: bytes) -> None:
        """End *session*, and send all open transfers by the link. Any thread.

        b"" means a session that has not been opened. If the current session is another one, do nothing.
        """
        with self._lock:
            if self._closed or session != self._session:
                return
            self._session = b""
            streams, self._streams = self._streams, []
            lost, self._outgoing = self._outgoing, {}
            self._failed_at = None if why == IDLE else time.monotonic()
            self._queue.clear()
            self._next = None
            self._early.clear()
            open_ones = len(lost) + len(self._incoming)
        # a peer that ends closes its streams, too: only what was under way is worth a warning
        level = logging.WARNING if open_ones and why != IDLE else logging.DEBUG
        log.log(level, "large parts to and from %s go by the slower link for %g s: %s", self.name, RETRY_S, why)
        self._transport.forget(session)
        for stream in streams:
            stream.close()
        if session:
            self._send(MARK + _encode(Ended(session, why)), ())
        for number, transfer in lost.items():
            self._send(MARK + _encode(Inline(number)), [b"", *transfer.parts])

    # --- what arrives by the link; loop thread ---

    def takes(self, header: bytes, parts: list[Buffer]) -> bool:
        """Return True if the message is one of this module, or must wait behind one; `deliver` then gets it in turn."""
        if header[:1] == MARK:
            try:
                self._handle(_decode(memoryview(header)[1:]), parts)
            except RemoteWireError as error:
                log.warning("dropped a message about bulk streams from %s: %s", self.name, error)
        elif self._held:
            self._held.append((header, parts, None))
        else:
            return False
        return True

    def _handle(self, message: AnyMessage, parts: list[Buffer]) -> None:
        if isinstance(message, Announce):
            self._begin(message, parts)
        elif isinstance(message, TransferDone):
            with self._lock:
                for number in message.transfers:
                    self._outgoing.pop(number, None)
        elif isinstance(message, Inline):
            with self._lock:
                incoming = self._incoming.get(message.transfer)
                if incoming is None and self._expects(message.transfer):
                    self._by_link[message.transfer] = parts[1:]
                if incoming is None or incoming.complete:
                    return
                incoming.complete_with(parts[1:])
            self._completed(message.transfer)
        elif isinstance(message, Open):
            if self._address is None:
                self._accept(message)
        else:
            self.end(message.why, message.session)

    def _expects(self, transfer: int) -> bool:
        """Return True if the message of *transfer* may still arrive. Threads that send at once overtake one another."""
        return transfer in self._overtaken or 0 < transfer - self._announced <= OVERTAKEN - len(self._overtaken)

    def _accept(self, message: Open) -> None:
        """Let the peer connect to this process's bulk port."""
        if self._session:
            self.end("there is a new one", self._session)
        with self._lock:
            self._session, self._failed_at = message.session, None
        if message.keyed != self._transport.keyed or not self._transport.port:
            self.end("one of the two processes has no keys, or does not listen", message.session)
        else:
            self._transport.expect(self, message.session, message.secret)

    def _begin(self, message: Announce, parts: list[Buffer]) -> None:
        """Keep a message until its transfer is complete, and all later messages behind it."""
        sizes = [size for _, size in message.rows]
        if sum(sizes) + self._arriving > MEMORY or not self._expects(message.transfer):
            raise RemoteWireError(f"a transfer of {sum(sizes)} bytes, or one that came before")
        if any(index >= len(parts) for index, _ in message.rows):
            raise RemoteWireError("a transfer with parts that the message does not have")
        lone = len(message.rows) == 1 and message.rows[0][0] == len(parts) - 1  # its last part is the only large one
        asks = lone and not self._held  # no message is held, so this one is delivered next
        given = self._target_for(message.header, parts, sizes[0], self._ask_again) if asks else None
        incoming = Incoming(message.rows, self._transport.memory, given, lone)
        with self._lock:
            if self._closed:
                return
            self._overtaken.update(range(self._announced + 1, message.transfer))
            self._overtaken.discard(message.transfer)
            self._announced = max(self._announced, message.transfer)
            self._incoming[message.transfer] = incoming
            self._arriving += incoming.size
            self._early.discard(message.transfer)
            streams = list(self._streams)
            came = self._by_link.pop(message.transfer, None)
        self._held.append((message.header, parts, incoming))
        if came is not None:
            incoming.complete_with(came)
            self._completed(message.transfer)
            return
        for stream in streams:
            stream.kick()
        if not self._open():
            self._send(MARK + _encode(Ended(b"", "they have failed a moment ago")), ())

    def _completed(self, transfer: int) -> None:
        with self._lock:
            incoming = self._incoming.pop(transfer, None)
            self._arriving -= 0 if incoming is None else incoming.size
        if incoming is not None and not self._closed:
            self._send(MARK + _encode(TransferDone([transfer])), ())
            self._advance()

    def _advance(self) -> None:
        """Deliver the held messages up to the first whose transfer is not complete."""
        while self._held and not self._closed:
            header, parts, incoming = self._held[0]
            if incoming is not None and not incoming.complete:
                self._ask_again()
                return
            if incoming is not None:
                incoming.put_into(parts)
            self._transport.deliver(self.name, partial(self._deliver, header, parts), self._failed)
            if self._held:  # else `close` was called meanwhile
                self._held.popleft()  # last: until it is delivered, later messages wait behind it

    def _ask_again(self) -> None:
        """Let the rest of the message that is delivered next arrive in the memory of a receive, if one has memory now.

        A receiver that was late once is late for each message of a stream: the next one arrives while it copies.
        """
        if not self._held or self._closed:
            return
        header, parts, incoming = self._held[0]
        with self._lock:
            wanted = incoming is not None and incoming.wants_memory
        given = self._target_for(header, parts, incoming.size, self._ask_again) if incoming and wanted else None
        if incoming is not None and given is not None:
            with self._lock:
                incoming.give(given)

    # --- the end ---

    def forget_outgoing(self) -> None:
        """Send nothing more, because the peer's process has ended. What it has sent may still arrive."""
        with self._lock:
            self._outgoing.clear()
            self._queue.clear()
            self._next = None

    def close(self) -> None:
        """End all transfers, because the link has ended. Any thread; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            session, streams, self._streams = self._session, [*self._streams, *self._retired], []
            for incoming in self._incoming.values():
                incoming.drop()
            self._incoming.clear()
        self.forget_outgoing()
        self._transport.soon(self._held.clear)
        self._transport.forget(session)
        for stream in streams:
            stream.close()
