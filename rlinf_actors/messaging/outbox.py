"""What this worker sends to one other worker: in order, within the window, each with one end.

Any thread may post; what is sent on the link happens under the outbox's lock, which keeps the order.

The end of a send that goes more than one way: it has ended well when all of them have, and badly with the first.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlinf_actors.messaging.contents import size_of
from rlinf_actors.messaging.directory import gone
from rlinf_actors.messaging.flow_control import OVERHEAD, Window
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames


@dataclass(frozen=True)
class Letter:
    """One message to send.

    Attributes:
        stream: "" or the broadcast's.
        parts: its contents.
        large: whether some parts are the sender's own memory: then `work` ends when the receiver holds them.
        work: ends when it was sent.
        weight: bytes beside `parts` that are kept, here or there, until it is received.
        cargo: what comes with it by other ways.
        departed: called, with the outbox's lock held, when it has left.
    """

    stream: str
    parts: Sequence[Buffer]
    large: bool
    work: AsyncWork[None]
    weight: int = 0
    cargo: frames.Cargo | None = None
    departed: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes of the window."""
        return size_of(self.parts) + OVERHEAD + self.weight


class Outbox:
    """To one worker.

    Args:
        peer: the receiver.
        name: of this worker.
        worker_id: its id.
        limit: the window in bytes.
    """

    def __init__(self, peer: Peer, name: str, worker_id: str, limit: int) -> None:
        self._peer = peer
        self._name = name
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._window: Window[Letter] = Window(limit)
        self._unheld: dict[int, Letter] = {}
        self._numbers = itertools.count(1)
        self._error: Exception | None = None
        self._id = peer.listen(self._answered)
        peer.on_gone(self.fail)

    def post(self, letter: Letter, *, now: bool = False) -> None:
        """Send as soon as the window lets it. *now*: somebody waits for it."""
        size = letter.size
        with self._lock:
            error = self._error
            over = error is None and self._window.offer(size, letter) and self._send(letter, now)
        if error is not None:
            letter.work.reject(gone(self._peer, error, letter.work._what))
        elif over:
            letter.work.resolve(None)

    def _answered(self, frame: frames.AnyFrame) -> None:
        """Something was taken, or is held. Loop thread."""
        ended: list[Letter] = []
        if type(frame) is frames.Returned:
            with self._lock:
                ended = [letter for letter in self._window.returned(frame.size) if self._send(letter, False)]
        elif type(frame) is frames.Held:
            with self._lock:
                held = self._unheld.pop(frame.n, None)
            ended = [held] if held is not None else []
        for letter in ended:
            letter.work.resolve(None)

    def fail(self, error: Exception) -> None:
        """The receiver is gone, or out of step with this end. Any thread."""
        with self._lock:
            self._error = self._error or error
            lost = [*self._unheld.values(), *self._window.drain()]
            self._unheld.clear()
        for letter in lost:
            letter.work.reject(gone(self._peer, error, letter.work._what))

    def _send(self, letter: Letter, now: bool) -> bool:
        """Whether that ended it: nothing of the sender's own memory is under way. With the lock held."""
        parts, number = letter.parts, 0
        own = letter.large
        if own:
            parts, stored = self._peer.store(parts)
            own = not stored
        if own:
            number = next(self._numbers)
            self._unheld[number] = letter
        frame = frames.UserMessage(
            self._id, number, self._name, self._worker_id, letter.stream, letter.size, letter.cargo
        )
        self._peer.send(frame, parts, now=now, alone=not letter.stream)
        if letter.departed is not None:
            letter.departed()
        return not own


class Trip:
    """Any thread.

    Args:
        work: the caller's.
        ways: how many must end.

    Attributes:
        held: the way of the message itself; the outbox ends it.
    """

    def __init__(self, work: AsyncWork[None], ways: int) -> None:
        self._work = work
        self._left = ways
        self._lock = threading.Lock()
        self.held: AsyncWork[None] = AsyncWork(work._what)
        self.held._seen = True  # its error is the caller's work's
        self.held._on_done(self._held_done)

    def one_done(self) -> None:
        """One of the ways has ended well."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._work.resolve(None)

    def failed(self, error: BaseException) -> None:
        """One of the ways has ended badly."""
        self._work.reject(error)

    def _held_done(self) -> None:
        error = self.held.error
        if error is None:
            self.one_done()
        else:
            self.failed(error)
