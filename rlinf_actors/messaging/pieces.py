"""Overlap the two copies of a large tensor: the sender announces it before writing it, and writes it piece by piece.

A tensor that `send_tensor` sends to `recv_tensor` on the same machine is copied twice: into the sender's shared memory,
and from there into the receiver's tensor. The message leaves when its block is allocated (UserMessage.unwritten). The
sender's thread then writes the block, and reports each piece by a Written frame. The receiver copies the pieces as they
are reported, so both copies run at once, and the whole takes one copy and one piece.

The receive gets its message when the last piece is written, as if the message came only then. What was copied before is
no more than a head start (`messaging.receive_into`): a receive that is cancelled or times out gives the message back,
and every other kind of receive just waits. If the sender dies, or its connection is lost, the message fails
(`ArrivingPart`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rlinf_actors.errors import ConnectionLostError, GroupNotFoundError, PeerDiedError
from rlinf_actors.messaging.directory import WorkerDirectory, peer_gone_error
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.shared_memory import copy
from rlinf_actors.runtime.future import Promise
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts

if TYPE_CHECKING:
    from rlinf_actors.messaging.messenger import Messenger

PIECE = 4 << 20
"""Bytes that are written between two reports. A report costs both processes about 50 us, a piece some 400 us."""
FROM = 2 * PIECE
"""Size in bytes from which a tensor is written in pieces."""
_TRIES = 3


def write(block: memoryview, part: Buffer, tell: Callable[[int], None]) -> BaseException | None:
    """Copy *part* into *block* piece by piece, and call *tell* with the number of written bytes after each piece.

    If a signal handler raises meanwhile, go on, since the receiver waits for the rest, and return the exception.
    Otherwise return None. If a piece cannot be written, call *tell* with 0 and raise.
    """
    source, done, failures = memoryview(part).cast("B"), 0, 0
    interrupt: BaseException | None = None
    while done < len(block):
        try:
            end = min(done + PIECE, len(block))
            copy(block[done:end], source[done:end], end - done)
            tell(end)
            done, failures = end, 0
        except BaseException as error:  # returned or raised
            interrupt, failures = error, failures + 1
            if failures == _TRIES:
                tell(0)
                raise
    return interrupt


class ArrivingPart(Promise[None]):
    """The last part of a message, which its sender still writes. Done when the part is written, or cannot be.

    Args:
        what: names the part in errors.
        sender: id of the sending worker.
        parts: parts of the message; the last one is incomplete.
    """

    def __init__(self, what: str, sender: str, parts: AuthenticatedParts) -> None:
        super().__init__(what)
        self.sender = sender
        self.parts = parts
        self.size = memoryview(parts[-1]).nbytes
        self._written = 0
        self._guard = threading.Lock()
        self._follower: Callable[[int], object] = lambda _size: None

    def written(self, size: int) -> None:
        """Handle the sender's report that *size* bytes are written, 0 if the rest will not be. Loop thread only."""
        if size == 0:
            self.reject(ConnectionLostError(f"{self._what}: its sender could not write it"))
            return
        with self._guard:
            self._written = size = min(max(size, self._written), self.size)
            follower = self._follower
        follower(size)
        if size == self.size:
            self.resolve(None)

    def follow(self, follower: Callable[[int], object]) -> None:
        """Call *follower* with the number of written bytes now and after each piece, and with -1 at the end."""
        with self._guard:
            self._follower, size = follower, self._written
        follower(size)
        self._on_done(partial(follower, -1))

    def tensors(self) -> list[Any]:
        """Wait until the part is written. Raises PeerDiedError if the sender died before. No tensors are beside it."""
        self.wait()
        return []


class ArrivingParts:
    """The parts that are still being written by the senders of messages to this worker. Loop thread, except for `fail`.

    Args:
        directory: finds the senders.
        messenger: watches the senders, and calls `fail` when one is gone.
    """

    def __init__(self, directory: WorkerDirectory, messenger: Messenger) -> None:
        self._directory = directory
        self._messenger = messenger
        self._parts: dict[tuple[bytes, int, int], ArrivingPart] = {}  # by link, outbox and number of their message

    def __len__(self) -> int:
        return len(self._parts)

    def begin(self, link: bytes, frame: frames.UserMessage, parts: AuthenticatedParts) -> ArrivingPart:
        """Return the part that the sender of *frame* writes from now on."""
        key = (link, frame.id, frame.n)
        part = self._parts[key] = ArrivingPart(f"a tensor from {frame.src}", frame.src_id, parts)
        part._on_done(lambda: self._parts.pop(key, None))

        def found(peer: Peer | Exception) -> None:
            if isinstance(peer, GroupNotFoundError) or (
                not isinstance(peer, Exception) and peer.worker_id != frame.src_id
            ):
                ended = PeerDiedError(f"{part._what}: its sender has ended", peer=frame.src)
                self._messenger.when_read(frame.src_id, partial(part.reject, ended))
            elif isinstance(peer, Peer):
                self._messenger.watch(peer)
                if peer.error is None:  # else the messenger calls `fail` when all that it wrote was read
                    self.fail(peer)

        self._directory.peer(WorkerAddress.from_name(frame.src), found)
        return part

    def written(self, link: bytes, frame: frames.Written, _parts: AuthenticatedParts) -> None:
        """Handle a sender's report how much of a message's last part it has written."""
        part = self._parts.get((link, frame.id, frame.n))
        if part is not None:
            part.written(frame.size)

    def fail(self, peer: Peer) -> None:
        """Fail the parts that *peer* was still writing, if it is gone. Any thread."""
        error = self._messenger.error_of(peer)
        for part in list(self._parts.values()):
            if error is not None and part.sender == peer.worker_id:
                part.reject(peer_gone_error(peer, error, part._what))

    def forget(self, link: bytes) -> None:
        """Fail the parts of messages that came over *link*, whose process has ended."""
        for key, part in list(self._parts.items()):
            if key[0] == link:
                part.reject(PeerDiedError(f"{part._what}: its sender has ended"))
