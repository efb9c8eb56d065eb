"""Reading: which thread reads the data sockets of this process.

Theory of operation. The data sockets of a process (the listener of a worker, the links to workers) are in two epolls:
W, by which a thread polls that has nothing to do but wait, and O, which the I/O thread's loop watches. Both report
edges (EPOLLET), and the kernel gives each edge to one of them (EPOLLEXCLUSIVE): to W, the first in the socket's queue,
if a thread polls it, else to O. So the I/O thread takes over in the moment in which a waiting thread goes back to user
code, and no system call tells it: messages, cancels and other threads never depend on user code. The order of the queue
is how Linux does it; if both epolls report an edge, one thread finds nothing to read. The connection to the head is not
here: the loop always reads it.

*Followers.* An event loop that does not show when it waits has an epoll of its own with these sockets
(`net.loop_reader`). It stands between W and O in the sockets' queues, and an edge that W does not get goes to all of
these epolls and to O.

*The turn.* One thread at a time polls W: the one that has the turn (`take`). Other threads sleep until their results
are there, and get no turn when the reader leaves: the I/O thread reads for them. Each wait takes the turn with an
object of its own: so it can give the turn back even if a signal handler raised before it heard that it has the turn.

*Handling.* Messages are handled by one thread at a time, so that those of a source stay in order. What is to be read
stands in `_due`. Whoever finds that another thread handles messages leaves it there, and that thread looks again after
it has let the lock go (`_handle`). No thread waits for that lock. A waiting thread handles ROUNDS sources at most, and
leaves the rest to the loop.

*What a Source must do*, a function that is never called by two threads at once:
* Receive what has arrived, in limited portions, and handle it. Return True if more may be left: the descriptor does not
  announce it again.
* Handle only what is safe on any thread. Everything else goes to the loop, in order: once a message of this source went
  there, later ones follow until the loop has handled it (`LoopQueue`). Its argument is True on the loop's thread.
* Whoever touches a libzmq socket elsewhere, such as by a send, looks at its events again under the socket's lock, and
  calls `again` if they say that something can be received: the touch may have consumed the edge.
* `add` and `remove` may be called on any thread, `remove` also while another thread reads.

*Waking.* A result may come another way than by these sockets: from the head, a timer, another thread. `ring` then wakes
the thread that polls W. No thread polls while it holds a lock.

*Signals.* On the main thread a handler of a signal may raise anywhere. While it handles messages they are held back
(`net.held_signals`). During the poll they run at once, as in any blocking call; the loop then looks at all sources,
because the poll may have taken an edge.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from rlinf_actors import forks
from rlinf_actors.net import held_signals
from rlinf_actors.net.loop import BUG, call_threadsafe

EVENTS = 64
"""Most descriptors that one poll reports."""
ROUNDS = 64
"""Most sources that are read before the loop lets other callbacks run, or a thread looks whether it is done."""

active: Reading | None = None
"""The Reading by which threads of this process wait; None if there is none, or if threads must not read."""
threads_read = False
"""True if threads that wait read the sockets of this process. The Runtime sets it before the first socket is opened."""

_EXCLUSIVE: int = getattr(select, "EPOLLEXCLUSIVE", 1 << 28)  # a Python built with headers of before 2016 lacks it
_EDGES = select.EPOLLIN | select.EPOLLET | _EXCLUSIVE
_ENDED = select.EPOLLHUP | select.EPOLLERR
_get_ident = threading.get_ident


Source = Callable[[bool], bool]
"""Receives and handles messages of one socket, see the module's text. True on the loop's thread: *on_loop*."""


class Follower(Protocol):
    """An event loop of user code that reads too (`net.loop_reader`)."""

    @property
    def ended(self) -> bool: ...
    def close(self) -> None: ...


def available() -> bool:
    """Return True if the kernel has EPOLLEXCLUSIVE (Linux 4.5). Else the I/O thread alone reads.

    Older kernels ignore bits that they do not know. A kernel that knows this one refuses it beside EPOLLONESHOT.
    """
    bell = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        with select.epoll() as poll:
            poll.register(bell, select.EPOLLIN | select.EPOLLONESHOT | _EXCLUSIVE)
    except OSError as error:
        return error.errno == errno.EINVAL
    finally:
        os.close(bell)
    return False


class Reading:
    """Who reads the data sockets of a process. See the text of this module.

    Args:
        loop: the loop of the I/O thread. Make this object on its thread, or before it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._sources: dict[int, Source] = {}
        self._due: collections.deque[Source] = collections.deque()
        self._handling = threading.Lock()
        self._handler = 0  # ident of the thread that has the turn and handles messages now
        self._afterwards: Callable[[], object] | None = None
        self._turn: dict[int, object] = {}  # 0: the holder. `setdefault` is one step, which no signal handler can part
        self._changing = threading.Lock()
        self._closed = False
        self._by_loop: set[int] | None = None  # descriptors that are the loop's, once `leave_to_loop` was called
        self._guest: object = None  # the event loop whose selector is in W
        self._guest_fd = -1
        self.followers: dict[int, Follower] = {}
        self._polls: dict[int, select.epoll] = {}  # theirs
        self._signals = held_signals.main
        self._main = threading.main_thread().ident
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting = select.epoll()  # W
        self._loops = select.epoll()  # O
        self._waiting.register(self._bell, _EDGES)
        self._poll = self._waiting.poll
        self.ring = self._ring  # one object, by which a Future forgets it
        loop.add_reader(self._loops.fileno(), self._loop_ready)
        forks.watch(self)
        global active
        active = self

    def add(self, fd: int, source: Source) -> None:
        """From now on, call *source* when *fd* is readable. Loop thread.

        Raises:
            OSError: the kernel watches no further descriptor (ENOSPC, ENOMEM); nothing reads *fd*.
        """
        if self._by_loop is not None:
            self._by_loop.add(fd)
            self.loop.add_reader(fd, source, True)
            return
        with self._changing:
            if fd == self._guest_fd:
                self._guest = None  # its selector was closed: the number is now another file's
            # Before the descriptor is registered: the kernel reports its first bytes once, to a thread that looks the
            # source up here.
            self._sources[fd] = source
            # W first: the kernel asks the first one first. O last: event loops of user code are woken before it
            polls = [self._waiting, *self._polls.values(), self._loops]
            for n, poll in enumerate(polls):
                try:
                    poll.register(fd, _EDGES)
                except OSError:
                    del self._sources[fd]
                    for before in polls[:n]:
                        before.unregister(fd)
                    raise

    def remove(self, fd: int) -> None:
        """Stop reading *fd*. Call it before *fd* is closed. A source that runs on another thread goes on."""
        if self._by_loop is not None and fd in self._by_loop:
            self._by_loop.discard(fd)
            self.loop.remove_reader(fd)
            return
        with self._changing:
            if self._sources.pop(fd, None) is not None and not self._closed:
                for poll in (self._waiting, *self._polls.values(), self._loops):
                    poll.unregister(fd)

    @property
    def left_to_loop(self) -> bool:
        return self._by_loop is not None

    def leave_to_loop(self) -> None:
        """Let no thread take the turn from now on: what this process handles belongs to the loop anyway.

        Later sockets do not come here, as if no thread read. Later connections of those that are here must announce
        themselves until all is read: the loop watches them without edges.
        """
        global threads_read
        threads_read = False
        self._by_loop = set()

    def follow(self, key: int, follower: Follower, poll: select.epoll) -> bool:
        """Put the sockets into *poll*, by which *follower* reads too, and return True; False if it must not.

        `followers` has it under *key* until it has ended. Any thread.
        """
        self.forget_ended()
        with self._changing:
            if self._closed or self._by_loop is not None:
                return False
            try:
                for fd in self._sources:
                    poll.register(fd, _EDGES)
            except OSError:  # the kernel watches no more: the I/O thread reads
                return False
            for fd in self._sources:
                self._loops.unregister(fd)
                self._loops.register(fd, _EDGES)  # behind *poll*; reports what has come meanwhile
            self.followers[key], self._polls[key] = follower, poll
        return True

    def ended(self, follower: Follower) -> None:
        """Close the epoll of *follower* soon, which has ended. Any thread, with any lock held."""
        if self._closed:
            follower.close()
        else:
            call_threadsafe(self.loop, self.forget_ended)

    def forget_ended(self) -> None:
        """Close the epolls of followers that have ended. Any thread."""
        with self._changing:
            for key in [key for key, follower in self.followers.items() if follower.ended]:
                del self._polls[key]
                self.followers.pop(key).close()

    def read(self, poll: select.epoll) -> None:
        """Handle what *poll* of a follower reports. The follower's thread."""
        if self._closed:
            return
        events = poll.poll(0, EVENTS)
        if _get_ident() != self._main:
            self._handle(events, False)
            return
        self._signals.hold()
        try:
            self._handle(events, False)
        finally:
            self._signals.release()

    def again(self, source: Source) -> None:
        """Have *source* called soon, although its descriptor may not be readable. Any thread."""
        self._due.append(source)
        if self._handler != _get_ident():  # else this thread looks afterwards
            call_threadsafe(self.loop, self._handle_due)

    def close(self) -> None:
        """Stop all reading. Loop thread. The descriptors are closed when no thread polls any more."""
        global active
        with self._changing:
            if self._closed:
                return
            self._closed = True
            self._sources.clear()
            followers, self.followers = list(self.followers.values()), {}
            self._polls.clear()
        for follower in followers:
            follower.close()
        if active is self:
            active = None
        self._due.clear()
        self.loop.remove_reader(self._loops.fileno())
        self._loops.close()
        self._ring()
        self._close_if_left()

    def _close_if_left(self) -> None:
        mine = object()  # of two threads that come here at a time, one gets the turn, which is never given back
        if self._turn.setdefault(0, mine) is mine:
            self._waiting.close()
            bell, self._bell = self._bell, -1
            os.close(bell)

    def note_fork(self) -> None:
        """Never read in a forked child: the epolls are the parent's. Called there by `forks`."""
        self._closed = True
        self._turn = {0: self}
        self._changing = threading.Lock()
        self._sources.clear()
        self.followers, self._polls = {}, {}
        global active
        if active is self:
            active = None

    # --- a waiting thread ---

    @property
    def taken(self) -> bool:
        """True if a thread has the turn."""
        return 0 in self._turn

    def take(self, holder: object) -> bool:
        """Take the turn for *holder*, an object of this wait alone. Return False if another one has it."""
        return self._by_loop is None and self._turn.setdefault(0, holder) is holder

    def holds(self, holder: object) -> bool:
        return self._turn.get(0) is holder

    def leave(self, holder: object) -> None:
        """Give back the turn, if *holder* has it. Idempotent. Where a signal handler may raise, call it twice then."""
        if self._turn.get(0) is holder:
            del self._turn[0]
            if self._closed:
                self._close_if_left()

    def wait(self, done: Callable[[], object], timeout: float | None = None, hold_signals: bool = True) -> bool:
        """Read the sockets until *done* returns True. The caller has the turn.

        Args:
            done: is the wait over? Must not block. Whatever makes it true calls `ring` afterwards.
            timeout: seconds, None for no limit.
            hold_signals: False if a signal handler that raises in this thread ends the process anyway.

        Returns:
            False if the time was over first, or if this Reading was closed.
        """
        if self._guest is not None:
            with self._changing:
                self._part()
        limit, left = None if timeout is None else time.monotonic() + timeout, -1.0
        signals = self._signals if hold_signals and _get_ident() == self._main else None
        try:
            while not done():
                if limit is not None:
                    left = limit - time.monotonic()
                    if left <= 0:
                        return False
                if self._closed:
                    return False
                events = self._poll(left, EVENTS)
                if signals is None:
                    self._handle(events, False)
                else:
                    signals.hold()
                    try:
                        self._handle(events, False)
                    finally:
                        signals.release()
        except BaseException:
            self._look_at_all()
            raise
        return True

    def poll_with(self, guest: object, selector: int, timeout: float) -> bool:
        """Poll W and the descriptor *selector* of the event loop *guest* once, and read what is ready.

        The caller has the turn. Return True if *selector* is ready.
        """
        if self._guest is not guest:
            with self._changing:
                self._part()
                try:
                    self._waiting.register(selector, select.EPOLLIN)
                    self._guest, self._guest_fd = guest, selector
                except BaseException:  # of a signal handler, perhaps: then the selector is in W, and has no guest
                    with contextlib.suppress(OSError, ValueError):
                        self._waiting.unregister(selector)
                    raise
        try:
            events = self._poll(timeout, EVENTS)
            ready = (selector, select.EPOLLIN) in events
            if len(events) > ready:  # `_handle` passes the selector over
                if _get_ident() != self._main:
                    self._handle(events, False)
                else:
                    self._signals.hold()
                    try:
                        self._handle(events, False)
                    finally:
                        self._signals.release()
        except BaseException:
            self._look_at_all()
            raise
        return ready

    def part(self, guest: object) -> None:
        """Take the selector of the event loop *guest* out of W, before it is closed. Any thread.

        The kernel would do so only when all copies of its descriptor are closed, and a forked child may have one: if it
        is ready, the threads that poll W would never sleep again.
        """
        with self._changing:
            if self._guest is guest:
                self._part()

    def _part(self) -> None:
        """Take the selector of the last event loop out of W. The caller holds `_changing`."""
        guest, self._guest = self._guest, None
        if guest is not None:
            try:  # noqa: SIM105 - a call of `suppress` is a place at which a signal handler may raise
                self._waiting.unregister(self._guest_fd)
            except (OSError, ValueError):  # it, or W, was closed meanwhile
                pass

    def _ring(self) -> None:
        """Let the thread that polls W look again whether it is done. Any thread; after the event that it waits for."""
        if self._handler != _get_ident():  # else it looks afterwards
            bell = self._bell
            if bell >= 0:
                os.eventfd_write(bell, 1)

    def after_handling(self, function: Callable[[], object]) -> None:
        """Call *function*: at once, or, in a signal handler that interrupts the handling of messages, afterwards."""
        if self._handler == _get_ident():
            self._afterwards = function
        else:
            function()

    def _look_at_all(self) -> None:
        """Have the loop read all sources: an exception came, perhaps between a poll and what it was to lead to.

        Twice, as `_found` does where a connection has ended.
        """
        self._due.extend(list(self._sources.values()) * 2)
        call_threadsafe(self.loop, self._handle_due)

    # --- the loop ---

    def _loop_ready(self) -> None:
        events = self._loops.poll(0, EVENTS)
        if self._turn:  # that thread was not polling yet, but W has this edge too: it may be quicker
            self._found(events)
            self.loop.call_soon(self._handle_due)
        else:
            self._handle(events, True)

    def _handle_due(self) -> None:
        self._handle((), True)

    # --- whoever handles messages ---

    def _found(self, events: Iterable[tuple[int, int]]) -> None:
        """Have the sources of *events* called: twice if the connection has ended.

        One event may tell a last message and the end, and a source that has read all of a message looks no further.
        """
        for fd, mask in events:
            source = self._sources.get(fd)
            if source is not None:
                self._due.append(source)
                if mask & _ENDED:
                    self._due.append(source)

    def _handle(self, events: Iterable[tuple[int, int]], on_loop: bool) -> None:
        due, rounds = self._due, ROUNDS
        self._found(events)
        while due:
            if not self._handling.acquire(False):
                return  # the other thread looks at `_due` after it has let go
            self._handler = 0 if on_loop else _get_ident()
            try:
                while due and rounds:
                    rounds -= 1
                    first = due.popleft()
                    try:
                        if first(on_loop):
                            due.append(first)
                    except Exception as error:  # noqa: BLE001 - a bug of ours: not the business of who happens to wait
                        self._failed(error)
            finally:
                self._handler = 0
                self._handling.release()
                if self._afterwards is not None and not on_loop:
                    afterwards, self._afterwards = self._afterwards, None
                    afterwards()
            if due and not rounds:
                call_threadsafe(self.loop, self._handle_due)
                return

    def _failed(self, error: Exception) -> None:
        context = {"message": "internal error: reading a socket failed", "exception": error, BUG: "of ours"}
        call_threadsafe(self.loop, self.loop.call_exception_handler, context)
