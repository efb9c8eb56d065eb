"""A receive: its place in the mailbox, and the work that its caller holds."""

from __future__ import annotations

import asyncio
import threading
import types
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.asyncwork import AsyncWork
from rlinf_actors.tensors.cargo import Arriving
from rlinf_actors.tensors.mailbox import Arrived, Key
from rlinf_actors.wire import payload


@dataclass(frozen=True)
class Body:
    """What the mailbox keeps of a message: the link it came by, the sender's outbox, its contents, and what
    comes with it by other ways.
    """

    link: bytes
    outbox: int
    parts: list[Buffer]
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

    def leave(self) -> bool:
        """Wait no more; False if there is a message or an error."""

    def unread(self, message: Arrived) -> None:
        """Nobody looked at this message."""


class Slot:
    """A receive as the mailbox has it. It does not keep the work alive: what nobody can look at gets nothing."""

    __slots__ = ("_work", "closed", "incarnation", "key", "timer")

    def __init__(self, key: Key, work: Received) -> None:
        self.key = key
        self.incarnation = ""
        self.closed = False
        self.timer: asyncio.TimerHandle | None = None
        self._work = weakref.ref(work)

    @property
    def work(self) -> Received | None:
        """The caller's work, None if nobody has it any more."""
        return self._work()

    @property
    def abandoned(self) -> bool:
        """Whether nobody will look at what it gets."""
        return self.closed or self._work() is None


class Received(AsyncWork[Any]):
    """The work of a recv. The object is unpickled once, by the first thread that waits for it.

    A cancelled wait takes no message: when the last task that awaits it is cancelled, the receive leaves
    its place, and takes one again when somebody waits. A message that it got and that nobody looked at
    goes back to the mailbox when the work is dropped.

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

    def take(self, message: Arrived) -> None:
        """It is this message. Loop thread or the receiver's."""
        self._message = message
        self.resolve(None)

    def wait(self, timeout: float | None = None) -> Any:
        """See AsyncWork."""
        self._want()
        try:
            return super().wait(timeout)
        finally:
            self._waiters_change(-1)

    def __await__(self) -> Generator[Any, None, Any]:
        self._want()
        try:
            return (yield from super().__await__())
        except (asyncio.CancelledError, GeneratorExit):
            if self._waiters == 1 and not self.done() and self._place.leave():
                self.asleep = True
            raise
        finally:
            self._waiters_change(-1)

    def _want(self) -> None:
        with self._guard:
            self._waiters += 1
            wake, self.asleep = self.asleep and not self.done(), False
        if wake:
            self._place.enter()

    def _waiters_change(self, by: int) -> None:
        with self._guard:
            self._waiters += by

    def _outcome(self) -> Any:
        if self._error is not None:
            return super()._outcome()
        with self._guard:
            if self._message is not None:
                body, self._message = self._message.body, None
                try:
                    self._result = self._convert(body.decoded())
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
