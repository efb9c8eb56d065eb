"""Reading: which thread reads the data sockets of this process, and how a waiting thread takes that over.

Theory of operation. The data sockets of a process (the listener of a worker, the links to workers) are in one epoll E,
each with a Source that reads it. The I/O thread's loop watches another epoll O, which contains only E. So whoever wants
to read in place of the loop changes E's interest in O (which any thread may do; the readers of a uvloop are changed by
its own thread alone), polls E itself, and reads what is ready. The connection to the head is not in E: the loop always
reads it.

*Turns.* At most one thread reads at a time (`net.reader_turns` decides who). A thread that has nothing to do but wait
calls `wait`. The first one takes the turn; the others sleep until their result is there, or until the reader leaves and
gives one of them the turn. When nobody waits, the loop watches again. So before user code runs the loop has the sockets
back, and messages, cancels and other threads never depend on user code. A reader gives nothing up while it polls: it
checks that the turn is still its own when the poll returns, because a signal handler on its thread may have waited.

*What a Source must do* (`Source.read`, called by the thread that has the turn, never by two at once):
* Receive what has arrived, in limited portions, and handle it. Return True if more may be left that the descriptor does
  not announce; it is then read again soon.
* Handle only what is safe on any thread. Everything else goes to the loop, in order: once a message of this source went
  there, later ones follow until the loop has handled it (`LoopQueue`). If *on_loop* is True, this is the loop's thread.
* Whoever touches a libzmq socket elsewhere, such as by a send, looks at its events again under the socket's lock, and
  calls `again` if they say that something can be received: the touch may have consumed the edge.
* `add` and `remove` may be called on any thread, `remove` also while another thread reads.

*Waking.* A result may come another way than by these sockets: from the head, a timer, another thread. Its callback
`Waiter.wake` then opens the gate of a sleeper, or writes to an eventfd in E for the reader. Nobody polls while it holds
a lock, and nobody waits for a thread that polls.

*Signals.* On the main thread a handler of a signal may raise anywhere. While it handles messages they are held back
(`net.held_signals`). During the poll they run at once, as in any blocking call.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rlinf_actors import forks
from rlinf_actors.net.held_signals import HeldSignals
from rlinf_actors.net.loop import BUG, call_threadsafe
from rlinf_actors.net.reader_turns import ReaderTurns

T = TypeVar("T")

EVENTS = 64
"""Most descriptors that one poll reports."""
TURN = 256
"""Most messages that the loop handles of a `LoopQueue` before it lets other callbacks run."""

active: Reading | None = None
"""The Reading by which threads of this process wait; None if there is none, or if threads must not read."""
threads_read = False
"""True if threads that wait read the sockets of this process. The Runtime sets it before the first socket is opened."""


_READABLE = select.EPOLLIN
_get_ident = threading.get_ident


class Source(Protocol):
    """A socket whose descriptor is in `Reading`."""

    def read(self, on_loop: bool) -> bool:
        """Receive and handle messages. Return True if more may be left. See the module's text for the rules."""


class Waiter:
    """One thread that waits. `Reading.waiter` returns that of this thread; it is used again for the next wait.

    Attributes:
        thread: ident of the thread.
        gate: a lock that is held; the thread sleeps by acquiring it.
        handling: True while the thread handles messages. It looks whether it is done before it blocks again.
        busy: True while it is in use.
        signals: the signal handlers to hold back; None if *hold_signals* is False, or on another thread than the main.
        afterwards: called when the thread has handled its messages (`after_handling`).
    """

    __slots__ = ("_reading", "afterwards", "busy", "gate", "handling", "signals", "thread")

    def __init__(self, reading: Reading, hold_signals: bool = True) -> None:
        self._reading = reading
        self.thread = _get_ident()
        self.gate = threading.Lock()
        self.gate.acquire()
        self.handling = False
        self.busy = False
        main = threading.current_thread() is threading.main_thread()
        self.signals = HeldSignals() if main and hold_signals else None
        self.afterwards: Callable[[], object] | None = None

    def wake(self) -> None:
        """Let the thread look again whether it is done. Any thread; after the event that it waits for."""
        if not self.handling:
            self._reading._wake(self)

    def open(self) -> None:
        """Open the gate. A gate that is open too often lets the thread look once more, which is harmless."""
        if self.gate.locked():
            self.gate.release()


class Reading:
    """Who reads the data sockets of a process. See the text of this module.

    Args:
        loop: the loop of the I/O thread. Make this object on its thread, or before it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._turns: ReaderTurns[Waiter] = ReaderTurns()
        self._sources: dict[int, Source] = {}
        self._again: collections.deque[Source] = collections.deque()
        self._here = threading.local()
        self._poll = select.epoll()  # E
        self._loops = select.epoll()  # O
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.EPOLLIN)
        self._fd = self._poll.fileno()
        self._loops.register(self._fd, select.EPOLLIN)
        self._watched = True
        self._forked = False
        self._loop.add_reader(self._loops.fileno(), self._loop_ready)
        forks.watch(self)
        global active
        active = self

    def add(self, fd: int, source: Source) -> None:
        """From now on, call *source*'s `read` when *fd* is readable."""
        self._sources[fd] = source
        self._poll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Stop reading *fd*. Call it before *fd* is closed. A `read` that runs on another thread goes on."""
        if self._sources.pop(fd, None) is not None and not self._turns.closed:
            self._poll.unregister(fd)

    def again(self, source: Source) -> None:
        """Let the reader call *source*'s `read` soon, although its descriptor may not be readable. Any thread."""
        self._again.append(source)
        with self._lock:
            turns = self._turns
            if turns.closed or turns.loop_reads or (turns.reader is not None and turns.reader.handling):
                return  # who reads looks at `_again` before it stops
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Stop all reading. Loop thread. A thread that reads stops soon, and the descriptors are closed then."""
        global active
        with self._lock:
            if self._turns.closed:
                return
            self._turns.closed = True
            if active is self:
                active = None
            self._loop.remove_reader(self._loops.fileno())
            if self._turns.reader is not None:
                os.eventfd_write(self._bell, 1)
            else:
                self._close()

    def _close(self) -> None:
        self._sources.clear()
        self._again.clear()
        self._poll.close()
        self._loops.close()
        os.close(self._bell)

    def note_fork(self) -> None:
        """Never read in a forked child: the epolls are the parent's. Called there by `forks`."""
        self._lock = threading.Lock()
        self._turns = ReaderTurns()
        self._turns.closed = self._forked = True
        global active
        if active is self:
            active = None

    # --- the loop ---

    def _loop_ready(self) -> None:
        with self._lock:
            if not self._turns.loop_begins():
                return
        try:
            self._read(self._poll.poll(0, EVENTS), True)
        finally:
            with self._lock:
                self._turns.loop_ends()
                self._carry_out()

    def _carry_out(self) -> None:
        """Do what the last step of the turns orders. The caller holds the lock. May be repeated."""
        turns = self._turns
        if turns.closed:
            if turns.reader is None and not turns.loop_reads and not self._poll.closed and not self._forked:
                self._close()
            return
        watch = turns.reader is None
        if watch != self._watched:
            self._loops.modify(self._fd, _READABLE if watch else 0)
            self._watched = watch
        if turns.given is not None:
            turns.given.open()
            turns.given = None
        elif turns.resumed or (watch and self._again):
            os.eventfd_write(self._bell, 1)
            turns.resumed = False

    # --- a waiting thread ---

    def waiter(self) -> Waiter:
        """Return the Waiter of this thread, for one wait."""
        waiter: Waiter | None = getattr(self._here, "waiter", None)
        if waiter is None or waiter.busy:  # busy: this runs in a signal handler or finalizer, during another wait
            waiter = self._here.waiter = Waiter(self)
        waiter.busy = True
        return waiter

    def wait(self, waiter: Waiter, done: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until *done* returns True, and read the sockets meanwhile if nobody else does.

        Args:
            waiter: of this thread (`waiter`). Whatever makes *done* true calls its `wake` afterwards.
            done: is the wait over? Any thread; must not block.
            timeout: seconds, None for no limit.

        Returns:
            False if the time was over first.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        try:
            while not done():
                left = -1.0 if limit is None else min(limit - time.monotonic(), threading.TIMEOUT_MAX)
                if limit is not None and left <= 0:
                    return False
                if self._turns.reader is waiter or self._ask(waiter, done):
                    self._handle(waiter, [] if self._again else self._poll.poll(left, EVENTS))
                elif not done():
                    waiter.gate.acquire(timeout=left)
            return True
        finally:
            try:
                self._leave(waiter)
            except BaseException:  # a signal handler raised there
                self._leave(waiter)
                raise

    def _ask(self, waiter: Waiter, done: Callable[[], object]) -> bool:
        with self._lock:
            if done():  # from now on, `wake` finds this thread asleep or reading
                return False
            reads = self._turns.ask(waiter)
            self._carry_out()
            return reads

    def _handle(self, waiter: Waiter, events: list[tuple[int, int]]) -> None:
        signals = waiter.signals
        if signals is not None:
            signals.hold()
        try:
            if self._turns.reader is waiter and not self._turns.closed:
                waiter.handling = True
                self._read(events, False)
        finally:
            waiter.handling = False
            if signals is not None:
                signals.release()
            if waiter.afterwards is not None:
                waiter.afterwards()

    def after_handling(self, function: Callable[[], object]) -> None:
        """Call *function*: at once, or, in a signal handler that interrupts the handling of messages, afterwards."""
        reader = self._turns.reader
        if reader is not None and reader.handling and reader.thread == _get_ident():
            reader.afterwards = function
        else:
            function()

    # --- an event loop of user code (`IdleSelect`) ---

    def fileno(self) -> int:
        return self._fd

    def take(self, waiter: Waiter) -> bool:
        """Give *waiter* the turn if it is free, and return True; it then calls `leave`. Else return False."""
        with self._lock:
            taken = self._turns.take(waiter)
            if taken:
                self._carry_out()
                if self._again:
                    os.eventfd_write(self._bell, 1)
            return taken

    def handle_ready(self, waiter: Waiter) -> None:
        """Read what is ready, on the thread of *waiter*, whose turn it is."""
        self._handle(waiter, self._poll.poll(0, EVENTS))

    def leave(self, waiter: Waiter) -> None:
        """End the turn of *waiter*."""
        try:
            self._leave(waiter)
        except BaseException:  # a signal handler raised there
            self._leave(waiter)
            raise

    def _leave(self, waiter: Waiter) -> None:
        with self._lock:
            if self._turns.leave_to_nobody(waiter) and not self._again:
                self._loops.modify(self._fd, _READABLE)  # the usual case: as `_carry_out` does
                self._watched = True
            else:
                self._turns.leave(waiter)
                self._carry_out()
                waiter.gate.acquire(blocking=False)
        waiter.busy = False

    def _wake(self, waiter: Waiter) -> None:
        with self._lock:
            if self._turns.sleeps(waiter):
                waiter.open()
                self._turns.woken(waiter)
            elif self._turns.reader is waiter and not self._turns.closed:
                os.eventfd_write(self._bell, 1)

    # --- whoever has the turn ---

    def _read(self, events: list[tuple[int, int]], on_loop: bool) -> None:
        again = self._again
        due = [again.popleft() for _ in range(len(again))] if again else []
        for fd, _ in events:
            source = self._sources.get(fd)
            if source is not None:
                due.append(source)
            elif fd == self._bell:
                os.eventfd_read(self._bell)
        for n, source in enumerate(due):
            try:
                if source.read(on_loop):
                    again.append(source)
            except Exception as error:  # noqa: BLE001 - a bug of ours: it is not the business of who happens to wait
                context = {"message": "internal error: reading a socket failed", "exception": error, BUG: "of ours"}
                call_threadsafe(self._loop, self._loop.call_exception_handler, context)
            except BaseException:
                again.extend(due[n:])
                raise


class WaitingQueue(Generic[T]):
    """A queue like queue.SimpleQueue, for threads that read the sockets while they wait for an item.

    A signal handler must not raise on such a thread while it waits.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._items: collections.deque[T] = collections.deque()
        self._idle: collections.deque[Waiter] = collections.deque()
        self._here = threading.local()

    def put(self, item: T) -> None:
        """Add an item, and wake a thread that waits. Any thread."""
        self._items.append(item)
        idle = self._idle
        try:
            waiter = idle[-1]
            if not waiter.handling:  # else it reads, and looks for items afterwards
                waiter = idle.popleft()
        except IndexError:
            return  # all threads are busy
        waiter.wake()

    def get(self) -> T:
        """Remove and return the first item, and wait for one if there is none. Any thread."""
        items, idle, waiter = self._items, self._idle, self._waiter()
        while True:
            if items:
                if waiter.busy:
                    self._reading.leave(waiter)
                with contextlib.suppress(IndexError):  # another thread has taken it
                    return items.popleft()
                continue
            waiter.busy = True
            idle.append(waiter)
            try:
                self._reading.wait(waiter, items.__len__)
            finally:
                with contextlib.suppress(ValueError):  # whoever woke this thread has removed it
                    idle.remove(waiter)

    def expect(self) -> None:
        """Take the turn to read, because this thread calls `get` next, without user code in between.

        Called before an answer is sent: its receiver may be quick, and send the next call before `get` is reached.
        """
        waiter = self._waiter()
        if not self._items and not waiter.busy:
            waiter.busy = self._reading.take(waiter)

    def _waiter(self) -> Waiter:
        waiter: Waiter | None = getattr(self._here, "waiter", None)
        if waiter is None:  # a handler that raises while a thread waits for a call ends the process anyway
            waiter = self._here.waiter = Waiter(self._reading, hold_signals=False)
        return waiter

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class LoopQueue:
    """Messages of one source that must be handled on the loop, in order. Only the thread that reads appends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[..., object]) -> None:
        self._loop = loop
        self._handle = handle
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[object, ...]] = collections.deque()

    def __bool__(self) -> bool:
        """True if the loop has not handled all messages: later messages must be appended too."""
        return bool(self._waiting)

    def append(self, *message: object) -> None:
        """Let the loop handle *message* after all that were appended before."""
        with self._lock:
            self._waiting.append(message)
            first = len(self._waiting) == 1
        if first:
            call_threadsafe(self._loop, self._run)

    def _run(self) -> None:
        more = True
        try:
            for _ in range(TURN):
                try:
                    self._handle(*self._waiting[0])
                finally:
                    with self._lock:
                        self._waiting.popleft()
                        more = bool(self._waiting)
                if not more:
                    return
        finally:
            if more:
                self._loop.call_soon(self._run)
