"""A receive: its place in the mailbox, and the work that its caller holds."""

from __future__ import annotations

import asyncio
import threading
import types
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from rlinf_actors.messaging.mailbox import Arrived, Key
from rlinf_actors.messaging.tensor_transfer import Arriving
from rlinf_actors.runtime.future import AsyncWork, call_all
from rlinf_actors.wire import payload
from rlinf_actors.wire.payload import AuthenticatedParts


@dataclass(frozen=True, slots=True)
class Body:
    """What the mailbox keeps of a message: the link it came by, the sender's outbox, its contents, and what
    comes with it by other ways.
    """

    link: bytes
    outbox: int
    parts: AuthenticatedParts
    cargo: Arriving | None = None

    def decoded(self) -> Any:
        """The object; once, and when the cargo is here."""
        if self.cargo is None:
            return payload.decode(self.parts)
        return payload.decode(self.cargo.parts, self.cargo.tensors())


class Place(Protocol):
    """Where a receive waits."""

    def enter(self) -> None:
        """Wait for a message, behind those that wait already."""

    def leave(self) -> None:
        """Wait no more. A message that is on its way to the work is offered to it all the same."""

    def unread(self, message: Arrived) -> None:
        """Nobody looked at this message. Any thread, finalizers too."""


class Slot:
    """A receive as the mailbox has it. It does not keep the work alive: what nobody can look at gets nothing."""

    __slots__ = ("_work", "closed", "incarnation", "key", "pending", "timer")

    def __init__(self, key: Key, work: Received) -> None:
        self.key = key
        self.incarnation = ""
        self.closed = False
        self.pending: Arrived | None = None  # it has this message, and waits for what comes with it by other ways
        self.timer: asyncio.TimerHandle | None = None
        self._work = weakref.ref(work)

    @property
    def work(self) -> Received | None:
        """The caller's work, None if nobody has it any more."""
        return self._work()

    @property
    def abandoned(self) -> bool:
        """Whether nobody will look at what it gets."""
        work = self._work()
        return self.closed or work is None or work.done()


class Received(AsyncWork[Any]):
    """The work of a recv. The object is unpickled once, by the first thread that waits for it.

    A cancelled wait takes no message: when the last one that waits is cancelled, the receive leaves its
    place, a message that it has got meanwhile goes back to where it was, and the work is not done; it
    takes a place again when somebody waits. (A cancelled task keeps the work alive, by its traceback.) So
    does a message that nobody looked at when the work is dropped.

    Args:
        what: for messages of errors.
        place: where it waits.
        convert: makes the result of what was received.
    """

    def __init__(self, what: str, place: Place, convert: Callable[[Any], Any] = lambda value: value) -> None:
        super().__init__(what)
        self._place = place
        self._convert = convert
        self._guard = threading.Lock()
        self._waiters = 0
        self._message: Arrived | None = None
        self._result: Any = None
        self._failure: BaseException | None = None
        self._trace: types.TracebackType | None = None
        self.asleep = False

    waits_for_cargo = True
    """Whether it is given a message only when all that comes with it by other ways is here."""

    def take(self, message: Arrived) -> bool:
        """It is this message; False if the work wants none (any more). Loop thread or the receiver's."""
        with self._guard:
            if self.asleep:
                return False
            with self._lock:  # at once with the outcome: who is cancelled now gives both back
                if self._finished:
                    return False
                self._message, self._finished = message, True
                callbacks, self._callbacks = self._callbacks, ()
        call_all(callbacks)
        return True

    def wait(self, timeout: float | None = None) -> Any:
        """See AsyncWork."""
        self._want()
        cancelled = False
        try:
            return super().wait(timeout)
        except (KeyboardInterrupt, SystemExit):
            cancelled = True
            raise
        finally:
            self._unwant(cancelled)

    def __await__(self) -> Generator[Any, None, Any]:
        self._want()
        cancelled = False
        try:
            return (yield from super().__await__())
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            self._unwant(cancelled)

    def _want(self) -> None:
        with self._guard:
            self._waiters += 1
            wake, self.asleep = self.asleep and not self.done(), False
        if wake:
            self._place.enter()

    def _unwant(self, cancelled: bool) -> None:
        with self._guard:
            self._waiters -= 1
            message = self._fall_asleep() if cancelled and not self._waiters else None
        if message is not None:
            self._place.unread(message)

    def _fall_asleep(self) -> Arrived | None:
        """Nobody waits any more: leave the place; the message that has come all the same. With `_guard` held."""
        with self._lock:
            message, self._message = self._message, None
            if self._finished and message is None:
                return None  # an error, or somebody has looked already
            self._finished = False
        self.asleep = True
        self._place.leave()
        return message

    def _read(self, body: Body) -> Any:
        return body.decoded()

    def _outcome(self) -> Any:
        if self._error is not None:
            return super()._outcome()
        with self._guard:
            if self._message is not None:
                body, self._message = self._message.body, None
                try:
                    self._result = self._convert(self._read(body))
                except BaseException as error:  # noqa: BLE001 - what unpickling raises reaches every waiter
                    self._failure, self._trace = error, error.__traceback__
        if self._failure is not None:
            raise self._failure.with_traceback(self._trace)  # raised as it is, it would keep every waiter's frames
        return self._result

    def __del__(self) -> None:
        message = self.__dict__.get("_message")
        if message is not None:
            self._place.unread(message)
        super().__del__()
