"""A receive has two parts: its entry in the mailbox (PostedReceive), and the AsyncWork of its caller (PendingReceive).

The entry refers to the work weakly, so that a receive whose work the caller has dropped gets no message.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlinf_actors.errors import CallTimeoutError
from rlinf_actors.messaging.mailbox import ArrivedMessage, Key
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.runtime.future import AsyncWork, call_all
from rlinf_actors.runtime.late_report import late_text
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.tracing import flows, recorder
from rlinf_actors.wire import payload

if TYPE_CHECKING:
    from rlinf_actors.messaging.messenger import Messenger


ASKS_FROM_S = 1.0
"""Shortest time limit of a receive whose error says what the sender does: who polls is not held up."""


def traced(active: recorder.Recorder, work: AsyncWork[Any], name: str) -> int:
    """Record *work* as a span that ends when the work is done, and return the span's number."""
    span = active.begin(name, flows.MESSAGE)
    work._on_done(lambda: active.end(span))
    return span


def decoded(message: ArrivedMessage) -> Any:
    """Unpickle the object of *message*."""
    if message.tensors is None:
        return payload.decode(message.parts)
    return payload.decode(message.tensors.parts, message.tensors.tensors())


def no_message(what: str, timeout: float, sender: Peer | None = None) -> CallTimeoutError:
    """Return the error of the receive *what* if no message has come within *timeout* seconds.

    If *sender* is given, the error says what that worker does. That blocks for half a second at most.
    """
    text = f"{what}: no message came within {timeout:g} s"
    if sender is None or timeout < ASKS_FROM_S:
        return CallTimeoutError(text)
    return CallTimeoutError(f"{text}: {late_text([sender], timeout, connect=True)}")


class PostedReceive:
    """The mailbox entry of a receive.

    Attributes:
        key: the queue of the mailbox in which the receive waits.
        incarnation: id of the worker to receive from; "" until the worker is found.
        closed: True once the receive has its message or error, or was withdrawn.
        loading: the message, while tensors that travel beside the message are still on their way; else None.
        timer: fails the receive when its time is up; None without a limit.
        work: returns the caller's PendingReceive, which gets the message; None if the caller has dropped it.
    """

    __slots__ = ("_entered", "_messenger", "_sender", "closed", "incarnation", "key", "loading", "timer", "work")

    def __init__(self, messenger: Messenger, sender: WorkerAddress, work: Callable[[], PendingReceive | None]) -> None:
        self.work = work
        self.key: Key = (sender.get_name(), "")
        self.incarnation = ""
        self.closed = False
        self.loading: ArrivedMessage | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._messenger = messenger
        self._sender = sender
        self._entered = 0

    @property
    def abandoned(self) -> bool:
        """True if the receive must get no message: it is closed, its work is done, or the caller dropped the work."""
        work = self.work()
        return self.closed or work is None or work.done()

    def enter(self) -> None:
        """Look up the sender, then put the receive at the end of the sender's queue in the mailbox. Does not wait."""
        self.closed = False
        self._entered += 1
        self._messenger.directory.peer(self._sender, partial(self._found, self._entered))

    def _found(self, entered: int, peer: Peer | Exception) -> None:
        if entered == self._entered:  # else the receive was withdrawn during the look-up, and entered again
            self._messenger.post_receive(self, peer)


class PendingReceive(AsyncWork[Any]):
    """The AsyncWork of a recv. The first thread that waits for the object unpickles the object, once.

    A cancelled wait takes no message. When the last waiter is cancelled, the receive is withdrawn from the mailbox, and
    a message that the work got meanwhile returns to the mailbox. The work is then not done: when a caller waits for the
    work again, the receive enters the mailbox again. (A cancelled task keeps the work alive by its traceback.) If the
    work is dropped with a message that no waiter saw, the message returns to the mailbox too.

    Attributes:
        posted: the mailbox entry of the receive.
        asleep: True while the receive is withdrawn because its last waiter was cancelled.
    """

    _lazy = True
    span = 0
    """Number of the receive's span in the trace; 0 if this process is not traced."""
    waits_for_tensors = True
    """True if the work gets its message only after all tensors that travel beside the message have arrived."""

    def __init__(
        self,
        what: str,
        messenger: Messenger,
        sender: WorkerAddress,
        convert: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        super().__init__(what)
        self.posted = PostedReceive(messenger, sender, weakref.ref(self))
        self.asleep = False
        self._messenger = messenger
        self._convert = convert
        self._guard = threading.Lock()
        self._waiters = 0
        self._message: ArrivedMessage | None = None

    def _waited_for(self) -> tuple[str, Sequence[str]]:
        return self._what, [self.posted.key[0]]

    def limit(self, timeout: float) -> None:
        """Fail this receive with CallTimeoutError after *timeout* seconds, unless it is done by then. Does not wait."""
        posted, messenger = self.posted, self._messenger

        def expire() -> None:
            found = posted.work()
            if found is not None and not found.done() and (messenger.withdraw(posted) or found.asleep):
                found.reject(found.timed_out(timeout))

        def start() -> None:
            found = posted.work()
            if found is not None and not found.done():
                posted.timer = messenger._io.loop.call_later(timeout, expire)

        def stop() -> None:
            if posted.timer is not None:
                posted.timer.cancel()

        messenger._io.call(start)
        self._on_done(lambda: messenger._io.call(stop))

    def take(self, message: ArrivedMessage) -> bool:
        """Take *message* as the result. Return False if the work is done already, or if its last waiter was cancelled.

        If the result is False, the message must go back to the mailbox. Any thread.
        """
        with self._guard:
            if self.asleep:
                return False
            with self._lock:  # message and completion in one step: a waiter that is cancelled now gives back both
                if self._finished:
                    return False
                self._message, self._finished = message, True
                if self.span and message.flow and (active := recorder.active) is not None:
                    active.flow_in(self.span, message.flow)
                callbacks, self._callbacks = self._callbacks, ()
        call_all(callbacks)
        return True

    def wait(self, timeout: float | None = None) -> Any:
        self._add_waiter()
        cancelled = False
        try:
            return self._wait(timeout)
        except (KeyboardInterrupt, SystemExit):
            cancelled = True
            raise
        finally:
            self._remove_waiter(cancelled)

    def _wait(self, timeout: float | None) -> Any:
        return super().wait(timeout)

    def begins(self, message: ArrivedMessage) -> None:
        """Note that *message* will be the result, once everything that belongs to it has arrived. Any thread."""

    def __await__(self) -> Generator[Any, None, Any]:
        self._add_waiter()
        cancelled = False
        try:
            return (yield from super().__await__())
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            self._remove_waiter(cancelled)

    def timed_out(self, timeout: float) -> CallTimeoutError:
        """Return the error of this receive if no message has come within *timeout* seconds."""
        group, rank = self.posted.key[0].partition(":")[::2]
        remote = self._messenger.directory.known(group)
        known = remote is not None and rank.isdigit() and int(rank) < len(remote.peers)
        return no_message(self._what, timeout, remote.peers[int(rank)] if known and remote is not None else None)

    def _want(self) -> None:
        self._add_waiter()

    def _add_waiter(self) -> None:
        with self._guard:
            self._waiters += 1
            wake, self.asleep = self.asleep and not self.done(), False
        if wake:
            self.posted.enter()

    def _remove_waiter(self, cancelled: bool) -> None:
        with self._guard:
            self._waiters -= 1
            message = self._fall_asleep() if cancelled and not self._waiters else None
        if message is not None:
            self._messenger.unread(self.posted.key, message)

    def _fall_asleep(self) -> ArrivedMessage | None:
        """Withdraw the receive, because its last waiter was cancelled. Call with `_guard` held.

        Return a message that the work got meanwhile and that no caller has seen, else None.
        """
        with self._lock:
            message, self._message = self._message, None
            if self._finished and message is None:
                return None  # done with an error, or a waiter has seen the object
            self._finished = False
        self.asleep = True
        self._messenger.withdraw(self.posted)
        return message

    def _decode(self, message: ArrivedMessage) -> Any:
        return decoded(message)

    def _make_result(self, _value: None) -> Any:
        with self._guard:
            message, self._message = self._message, None
        assert message is not None
        return self._convert(self._decode(message))

    def __del__(self) -> None:
        message = self.__dict__.get("_message")
        if message is not None:
            self._messenger.unread(self.posted.key, message)
        super().__del__()
