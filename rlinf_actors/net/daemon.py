"""What agentd and the head share: how they run, how they end, and the shell around their pure cores.

`run_daemon` runs a daemon on an event loop. `CoreShell` connects that loop to a pure core. Everything here runs on the
daemon's main thread, and never in a user's process. A template has no event loop and uses the error policy only.

Error policy: an unexpected exception of our own code is a bug and leaves the daemon's state half changed. So the daemon
ends at once with exit code `INTERNAL_ERROR`, as if by kill -9, and a new daemon takes over. Bad input from a peer is
never such a bug: malformed bytes raise RemoteWireError and are dropped; a message that makes no sense is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Generic, NoReturn, TypeVar

from rlinf_actors.exhaustion import raise_file_limit
from rlinf_actors.exit_codes import INTERNAL_ERROR
from rlinf_actors.net.failure_detection import stalled_s
from rlinf_actors.net.loop import BUG, finish, new_event_loop

EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")

log = logging.getLogger(__name__)

SLICE_S = 0.002
"""Seconds of each turn of the loop in which a core goes on with long work, apart from the last slice."""
FULL_COLLECTION = 500
"""Collections of the middle generation between two of all objects, 10 by default. A full one stops a head that has
100,000 workers for 50 to 150 ms, and finds little: what ends is freed at once, unless it is part of a cycle."""


def run_daemon(serve: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run *serve*, a daemon's main coroutine, on a new event loop, and return its result, the exit code of the daemon.

    An unexpected exception in a callback or task ends the process. An exception of *serve* itself is raised, so that
    the caller can report it (an address in use, for example).
    """
    faulthandler.enable(2)  # a crash in C code, and the watchdog's SIGABRT to a loop that stands still, leave a trace
    raise_file_limit()
    gc.freeze()  # what was imported stays, and need not be looked at again
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION)
    loop = new_event_loop()
    end_on_internal_error(loop)
    try:
        return loop.run_until_complete(serve())
    finally:
        finish(loop)
        loop.close()


def on_stop_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[str], None]) -> None:
    """At each SIGTERM and SIGINT, call *stop* with the name of the signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # one turn of the loop later: if SIGUSR1 and SIGTERM arrive together, Python may handle SIGTERM first
        loop.add_signal_handler(number, loop.call_soon, stop, signal.Signals(number).name)


def end_on_internal_error(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, end this process if an exception escapes a callback of *loop*, a task or a message handler."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if ("handle" in context or BUG in context) and isinstance(context.get("exception"), Exception):
            end_process()

    loop.set_exception_handler(handle)


@contextlib.contextmanager
def ends_process(*expected: type[Exception]) -> Iterator[None]:
    """End this process if the ``with`` block raises an exception that is not of an *expected* class.

    Expected exceptions leave the block as usual.
    """
    try:
        yield
    except expected:
        raise
    except Exception:
        log.critical("internal error", exc_info=True)
        end_process()


def end_process() -> NoReturn:
    """Log that this daemon ends because of an internal error, and end the process at once with `INTERNAL_ERROR`."""
    log.critical("internal error (above): this process ends, since its state may be wrong")
    logging.shutdown()
    os._exit(INTERNAL_ERROR)


class CoreShell(Generic[EventT, CommandT]):
    """Connects an event loop to a pure core: the object that decides what a daemon does and does no I/O. Loop thread
    only.

    The shell passes events to the core, carries out the commands that the core returns, and passes *tick* at the time
    of each deadline of the core.

    Args:
        loop: the daemon's event loop.
        name: name of the daemon, for the log.
        decide: gives an event and the loop's time to the core; returns the core's commands.
        next_deadline: returns the time of the core's next deadline; infinity for none.
        carry_out: carries out one command.
        tick: the event to pass at a deadline.
        stalled: called with the number of seconds for which this process stood still; returns the event that reports
            it. The event is passed before *tick*: messages of that time still wait in the sockets, so silence of a peer
            proves nothing.
        finish: called after all events of one turn of the loop; returns the commands that the core has put off until
            then. None for a core that puts off none.
        unfinished: returns True if the core has long work under way; None for a core that has none.
        more: the event to pass then, again and again, for SLICE_S in each turn of the loop.
        spent: called after each *more* with the seconds that it took.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        decide: Callable[[EventT, float], Iterable[CommandT]],
        next_deadline: Callable[[], float],
        carry_out: Callable[[CommandT], object],
        *,
        tick: EventT,
        stalled: Callable[[float], EventT],
        finish: Callable[[], Iterable[CommandT]] | None = None,
        unfinished: Callable[[], bool] | None = None,
        more: EventT | None = None,
        spent: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._loop = loop
        self._name = name
        self._decide = decide
        self._next_deadline = next_deadline
        self._carry_out = carry_out
        self._tick_event = tick
        self._stalled_event = stalled
        self._finish = finish
        self._unfinished = unfinished
        self._more = more
        self._spent = spent
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._setting: asyncio.Handle | None = None
        self._put_off = False  # the core may have put off commands in this turn
        self._closed = False

    def handle(self, event: EventT) -> None:
        """Pass an event to the core and carry out the commands that it returns. After `close`, drop the event."""
        if self._closed:
            return
        self._pass(event, self._loop.time())
        if self._setting is None and not self._closed:  # once for all events of a turn, after their commands
            self._setting = self._loop.call_soon(self._end_turn)

    def _pass(self, event: EventT, now: float) -> None:
        self._put_off = True
        self.carry_out(self._decide(event, now))

    def carry_out(self, commands: Iterable[CommandT]) -> None:
        """Carry out commands that the caller has got from the core without `handle`."""
        for command in commands:
            self._carry_out(command)

    def close(self) -> None:
        """Stop the timer for the core's deadlines, and drop all later events. Idempotent."""
        self._closed = True
        for handle in (self._timer, self._setting):
            if handle is not None:
                handle.cancel()
        self._timer = self._setting = None

    def finish_turn(self) -> None:
        """Carry out what the core has put off, now: after messages that arrived together, for example."""
        if self._put_off and self._finish is not None and not self._closed:
            self._put_off = False
            self.carry_out(self._finish())

    def _end_turn(self) -> None:
        self._setting = None
        self.finish_turn()
        if not self._closed:
            self._set_timer()
        if not self._closed and self._unfinished is not None and self._unfinished():
            self._setting = self._loop.call_soon(self._slice)  # the loop looks at the sockets before

    def _slice(self) -> None:
        """Go on with the core's long work for SLICE_S."""
        now = time.monotonic()  # uvloop's time() stands still in a callback
        end = now + SLICE_S
        while self._more is not None and self._unfinished is not None and not self._closed and self._unfinished():
            self._pass(self._more, self._loop.time())
            self.finish_turn()  # what it has put off may be all that is left to do
            before, now = now, time.monotonic()
            self._spent(now - before)
            if now >= end:
                break
        self._end_turn()

    def _set_timer(self) -> None:
        due = max(self._next_deadline(), self._loop.time())  # an overdue deadline is no sign that we stood still
        if self._timer is not None:
            if self._due <= due:  # a tick too early does no harm, and spares a timer per event
                return
            self._timer.cancel()
            self._timer = None
        if due < math.inf:
            self._due, self._timer = due, self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self._timer = None
        now = max(self._loop.time(), due)  # uvloop's clock is coarser than its time()
        stall = stalled_s(due, now)
        if stall:
            text = "%s stood still for %.1f s: it or its machine was stopped, or is overloaded"
            log.warning(text, self._name, stall)
            self._pass(self._stalled_event(stall), now)
        self._pass(self._tick_event, now)  # after a stall too: not every deadline is a silence
        if not self._closed:
            self._end_turn()
