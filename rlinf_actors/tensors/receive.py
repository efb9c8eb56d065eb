"""A receive: its place in the mailbox, and the work that its caller holds."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.tensors.asyncwork import AsyncWork
from rlinf_actors.tensors.mailbox import Arrived, Key
from rlinf_actors.wire import payload


@dataclass(frozen=True)
class Body:
    """What the mailbox keeps of a message: the link it came by, the sender's outbox, its contents."""

    link: bytes
    outbox: int
    parts: list[Buffer]


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

    A message that it got and that nobody looked at goes back to the mailbox when the work is dropped:
    so a recv that was cancelled loses nothing.

    Args:
        what: for messages of errors.
        convert: makes the result of what was received.
        unread: takes a message back.
    """

    def __init__(self, what: str, convert: Callable[[Any], Any], unread: Callable[[Arrived], None]) -> None:
        super().__init__(what)
        self._convert = convert
        self._unread = unread
        self._reading = threading.Lock()
        self._message: Arrived | None = None
        self._result: Any = None
        self._failure: BaseException | None = None

    def take(self, message: Arrived) -> None:
        """It is this message. Loop thread or the receiver's."""
        self._message = message
        self.resolve(None)

    def _outcome(self) -> Any:
        if self._error is not None:
            return super()._outcome()
        with self._reading:
            if self._message is not None:
                parts, self._message = self._message.body.parts, None
                try:
                    self._result = self._convert(payload.decode(parts))
                except BaseException as error:  # noqa: BLE001 - what unpickling raises reaches every waiter
                    self._failure = error
        if self._failure is not None:
            raise self._failure
        return self._result

    def __del__(self) -> None:
        message = self.__dict__.get("_message")
        if message is not None:
            self._unread(message)
        super().__del__()
