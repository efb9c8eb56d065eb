"""ReaderTurns: decides which thread of a process reads its data sockets. Pure.

The turn to read belongs to nobody (then the event loop of the I/O thread watches the sockets), to the loop while it
reads, or to one waiting thread. The other waiting threads sleep. Each method is one step: the caller holds one lock
meanwhile, and then does what the step orders. tests/net/test_reader_turns.py tries all interleavings of the steps.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Thread(Protocol):
    """A waiting thread. *thread* is its ident: a signal handler that waits on the same thread is another Thread."""

    @property
    def thread(self) -> int: ...


W = TypeVar("W", bound=Thread)


class ReaderTurns(Generic[W]):
    """Who reads, and who sleeps.

    Attributes:
        reader: the waiting thread whose turn it is, None if it is nobody's or the loop's.
        loop_reads: True while the loop reads.
        closed: True if no thread may read any more.
        resumed: True if a reader that was interrupted has its turn back: the caller wakes it from its poll, because its
            result may have come meanwhile, and sets False.
        given: the sleeper that was given the turn and whose gate is still closed: the caller opens it, and sets None.
    """

    def __init__(self) -> None:
        self.reader: W | None = None
        self.loop_reads = False
        self.closed = False
        self.given: W | None = None
        self.resumed = False
        self._asleep: dict[W, None] = {}
        self._interrupted: list[W] = []  # readers whose thread runs a signal handler that reads

    def ask(self, waiter: W) -> bool:
        """Give *waiter* the turn, and return True; or return False: it must sleep until it is woken.

        If a signal handler interrupts a reader and waits itself, the reader gets its turn back when the handler leaves.
        """
        reader = self.reader
        if self.closed:
            self.leave(waiter)
        elif reader is waiter:
            return True
        elif not self.loop_reads and (reader is None or reader.thread == waiter.thread):
            if reader is not None:
                self._interrupted.append(reader)
            self.reader = waiter
            return True
        self._asleep[waiter] = None
        return False

    def take(self, waiter: W) -> bool:
        """Give *waiter* the turn if it is free, and return True; else return False. It does not sleep then."""
        if self.closed or self.loop_reads or self.reader is not None:
            return False
        self.reader = waiter
        return True

    def sleeps(self, waiter: W) -> bool:
        """Return True if *waiter* sleeps: the caller opens its gate, and calls `woken`."""
        return waiter in self._asleep

    def woken(self, waiter: W) -> None:
        """Count *waiter* as awake. It asks again if it is not done."""
        self._asleep.pop(waiter, None)

    def leave_to_nobody(self, waiter: W) -> bool:
        """Do as `leave` and return True, if it was *waiter*'s turn and nobody else gets it; else do nothing."""
        if self.reader is not waiter or self._asleep or self._interrupted or self.closed:
            return False
        self.reader = None
        return True

    def leave(self, waiter: W) -> None:
        """End the waiting of *waiter*, and give the turn to a sleeper if it was its own."""
        self._asleep.pop(waiter, None)
        if self.reader is waiter:
            self.reader = self._interrupted.pop() if self._interrupted else None
            if self.reader is None:
                self._next()
            else:
                self.resumed = True
        elif waiter in self._interrupted:
            self._interrupted.remove(waiter)

    def loop_begins(self) -> bool:
        """Return True if the loop may read now. It then calls `loop_ends`."""
        if self.reader is not None or self.loop_reads or self.closed:
            return False
        self.loop_reads = True
        return True

    def loop_ends(self) -> None:
        """End the loop's turn, and give the turn to a sleeper."""
        self.loop_reads = False
        self._next()

    def _next(self) -> None:
        if not self.closed and self._asleep:
            thread = next(iter(self._asleep)).thread
            # of one thread the innermost: a signal handler that waits has interrupted the others
            self.reader = self.given = [waiter for waiter in self._asleep if waiter.thread == thread][-1]
            del self._asleep[self.reader]
