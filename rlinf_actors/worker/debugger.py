"""`breakpoint()` in a worker: a thread waits, and `rlinf-actors attach` talks to its debugger.

`Debugger.hook` is the worker's `sys.breakpointhook`. The debugger (`worker_pdb`) runs on the thread of the user's code
that has called it, and its input and output are a `Stop`. All else is on the I/O thread: it keeps what the debugger has
said, and answers the questions of the newest attachment. So a worker that waits still answers agentd. The I/O thread
waits for no lock that a held thread could keep.

Threads wait here for ever, because their user wants them to. What ends the worker ends them: SIGTERM runs its handler
on a waiting main thread, and a robot worker's guard does not need the thread.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from rlinf_actors import forks
from rlinf_actors.net.loop import IoThread
from rlinf_actors.runtime.future import Promise
from rlinf_actors.settings import PYTHONBREAKPOINT
from rlinf_actors.wire.debug_values import (
    FREE,
    MAX_DEBUG_WAIT_S,
    MAX_OUTPUT,
    OVER,
    REPLACED,
    WAITS,
    DebugAnswer,
    DebugQuestion,
    attach_command,
)
from rlinf_actors.worker.debugger_command import DebuggerCommand

if TYPE_CHECKING:
    import asyncio
    import logging
    from pdb import Pdb

KEPT_CHARS = 1 << 18
"""Most characters of output that are kept for an attachment; the oldest are dropped."""
AT_ONCE = 4096
"""Characters that a debugger says at most before the I/O thread has taken them."""
TOGETHER_S = 0.1
"""For how long output waits for what comes after it, so that one answer has both."""


class _Asked(NamedTuple):
    """A question that waits for something to say, and how it is answered."""

    question: DebugQuestion
    answer: Callable[[DebugAnswer], object]


class _Wait(Promise[Any]):
    """A wait of a debugger's thread. The I/O thread ends it: the waiting thread does not read the sockets."""

    _by_loop = True


class Stop:
    """One thread in a breakpoint: the input and output of its debugger, and what is kept of them.

    The methods are for the debugger, on that thread. The attributes are the I/O thread's.

    Attributes:
        number: number of this breakpoint in its worker.
        thread: name of the thread.
        place: where it waits, such as "train.py:42 in step".
        kept: the newest output. It begins at the position `start`, and the newest step of the debugger at `step`.
        standing: what the debugger has said at that step: the line where it waits, and the prompt. "" until the prompt.
        typed: input that the debugger has not read.
        turn: ends when no other thread has a debugger any more, while this one waits for that.
        line: ends with the next line of input, while the debugger waits for one.
        over: True once the thread has left the breakpoint.
        command: the command that the debugger runs.
    """

    def __init__(self, debugger: Debugger, number: int) -> None:
        self._debugger = debugger
        self._unsent = ""
        self.number = number
        self.thread = threading.current_thread().name
        self.place = self.kept = self.typed = self.standing = ""
        self.start = self.step = 0
        self.turn: Promise[None] | None = None
        self.line: Promise[str] | None = None
        self.over = False
        self.command = DebuggerCommand()

    @property
    def end(self) -> int:
        """The position after the newest output."""
        return self.start + len(self.kept)

    def enter(self, place: str) -> None:
        """Wait until no other thread of this worker has a debugger. *place* is where this thread waits."""
        turn: Promise[None] = _Wait(f"its turn in breakpoint() at {place}, behind another thread")
        self._debugger.soon(self._debugger.enter, self, place, turn)
        turn.wait()

    def leave(self) -> None:
        """Say that this thread goes on."""
        self.flush()
        self._debugger.soon(self._debugger.leave, self)

    def readline(self) -> str:
        """Wait for the next line of input."""
        self.flush()
        line: Promise[str] = _Wait(f"breakpoint() at {self.place} ({self._debugger.attach})")
        self._debugger.soon(self._debugger.want_line, self, line)
        return line.wait()

    def write(self, text: str) -> int:
        """Say *text*. Wait for the I/O thread if that is long, so that a flood does not pile up."""
        self._unsent += text
        while len(self._unsent) >= AT_ONCE:
            taken = _Wait("the I/O thread")
            part, self._unsent = self._unsent[:AT_ONCE], self._unsent[AT_ONCE:]
            self._debugger.soon(self._debugger.said, self, part, taken)
            taken.wait()
        return len(text)

    def flush(self) -> None:
        """Say what has been written."""
        if self._unsent:
            self._debugger.soon(self._debugger.said, self, self._unsent)
            self._unsent = ""


class Debugger:
    """The breakpoints of this worker.

    Args:
        pdb: makes the debugger of a thread (`worker_pdb.WorkerPdb`), which few workers import.
        robots: the robots that this worker holds, for people.
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        io: IoThread,
        pdb: Callable[[Stop], Pdb],
        log: logging.LoggerAdapter[Any] | logging.Logger,
        robots: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.attach = attach_command(name, namespace)
        self.soon: Callable[..., object] = io.call
        self._io = io
        self._pdb = pdb
        self._log = log
        self._robots = robots
        self._made_in = forks.generation
        self._numbers = 0
        self._stops: deque[Stop] = deque()  # the first one has the turn
        self._last: Stop | None = None  # the one that was left last
        self._attachment = self._by = ""
        self._logged = False  # that the newest attachment is at a breakpoint
        self._number = 0  # of the input that was taken last
        self._asks = False  # the newest attachment knows that the debugger waits for input
        self._asked: _Asked | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False  # the timer ends after TOGETHER_S: there is output

    def hook(self, *args: Any, **kwargs: Any) -> Any:
        """Stop the calling thread in the debugger, as `sys.breakpointhook`. Any thread of user code.

        If the user has set PYTHONBREAKPOINT, and in a process that user code has forked, Python's own hook is called.
        """
        if os.environ.get(PYTHONBREAKPOINT) or forks.generation != self._made_in:
            return sys.__breakpointhook__(*args, **kwargs)
        if self._io.inside():
            self._log.warning("breakpoint() is ignored on the I/O thread of %s: nobody could attach", self.name)
            return None
        self._numbers += 1
        if self._robots:
            text = "%s holds %s and waits in a breakpoint: nothing commands the robot meanwhile, and its lease goes on"
            self._log.warning(text, self.name, ", ".join(self._robots))
        pdb = self._pdb(Stop(self, self._numbers))
        if header := kwargs.get("header"):
            pdb.message(header)
        pdb.set_trace(sys._getframe(1))
        return None

    # --- the I/O thread ---

    def where(self) -> tuple[str, int]:
        """Return where a thread waits in a breakpoint, and the number of that breakpoint; "" and 0 if none does."""
        return (self._stops[0].place, self._stops[0].number) if self._stops else ("", 0)

    def enter(self, stop: Stop, place: str, turn: Promise[None]) -> None:
        """Give a thread that has reached a breakpoint, or the next step, its turn: now or after other threads."""
        stop.place, stop.step, stop.standing, stop.over = place, stop.end, "", False
        if stop not in self._stops:
            self._stops.append(stop)
        if self._stops[0] is stop:
            turn.resolve(None)
        else:
            stop.turn = turn
        self._look()

    def leave(self, stop: Stop) -> None:
        """End the breakpoint of a thread, and give the next thread its turn."""
        if stop not in self._stops:
            return
        self._stops.remove(stop)
        stop.over, self._last = True, stop
        if self._stops:
            turn, self._stops[0].turn = self._stops[0].turn, None
            if turn is not None:
                turn.resolve(None)
        self._look()

    def want_line(self, stop: Stop, line: Promise[str]) -> None:
        """End *line* with the next line of input for a debugger."""
        stop.line, stop.command.wanted = line, False
        stop.standing = stop.standing or stop.kept[max(0, stop.step - stop.start) :][-MAX_OUTPUT:]
        self._feed(stop)
        self._look()

    def said(self, stop: Stop, text: str, taken: Promise[Any] | None = None) -> None:
        """Keep what a debugger has said for the newest attachment."""
        stop.kept += text.encode("utf-8", "replace").decode()
        dropped = max(0, len(stop.kept) - KEPT_CHARS)
        stop.kept, stop.start = stop.kept[dropped:], stop.start + dropped
        if taken is not None:
            taken.resolve(None)
        self._look()

    def _feed(self, stop: Stop) -> None:
        """Give the debugger the next line of input, if it waits for one and there is one."""
        if stop.line is not None and "\n" in stop.typed and self._stops[0] is stop:
            self._asks = False
            line, _, stop.typed = stop.typed.partition("\n")
            waiting, stop.line = stop.line, None
            waiting.resolve(f"{line}\n")

    # --- questions ---

    def asked(self, question: DebugQuestion, answer: Callable[[DebugAnswer], object]) -> None:
        """Answer a question of an attachment by *answer*: at once, or when there is something to say."""
        if question.attachment != self._attachment and question.number == 0:
            self._attachment, self._by, self._number, self._asks = question.attachment, question.by, 0, False
            self._logged = False
        elif question.attachment != self._attachment:
            answer(DebugAnswer(question.worker, REPLACED, by=self._by))
            return
        earlier, self._asked = self._take(), _Asked(question, answer)
        if earlier is not None and earlier.question.attachment != self._attachment:
            earlier.answer(DebugAnswer(question.worker, REPLACED, by=self._by))
        elif earlier is not None:  # this attachment has more to say before there was news
            earlier.answer(self._answer_to(earlier.question))
        stop = self._stop_of(question)
        new = (question.input or question.interrupts) and question.number > self._number
        if new and stop is not None and not stop.over:
            self._number = question.number
            if question.interrupts and stop.line is None:
                stop.command.interrupt()
            stop.typed += question.input
            self._feed(stop)
        wait_s = min(question.wait_s, MAX_DEBUG_WAIT_S)
        self._timer = self._io.loop.call_later(wait_s, self._look, True)
        self._look()

    def _stop_of(self, question: DebugQuestion) -> Stop | None:
        """Return the breakpoint of a question, which may be over; None if there is none."""
        if not question.stop:
            return self._stops[0] if self._stops else None
        known = [*self._stops, *([self._last] if self._last is not None else [])]
        return next((stop for stop in known if stop.number == question.stop), None)

    def _look(self, now: bool = False) -> None:
        """Answer the question that waits, if there is something to say; in any case if *now*.

        Output alone waits a moment for what comes after it. If the input goes on with `continue`, and the job ends
        then, nobody could ask a second question.
        """
        asked = self._asked
        if asked is None:
            return
        answer = self._answer_to(asked.question)
        if answer.state == WAITS and not self._logged:
            self._logged = True
            self._log.info("%s attaches to %s", self._by, self.name)
        said = answer.output and (not asked.question.stop or len(answer.output) == MAX_OUTPUT)
        if now or said or answer.state == OVER or answer.asks > self._asks:
            self._take()
            self._asks = answer.asks
            asked.answer(answer)
        elif answer.output and not self._soon:
            if self._timer is not None:
                self._timer.cancel()
            self._soon, self._timer = True, self._io.loop.call_later(TOGETHER_S, self._look, True)

    def _take(self) -> _Asked | None:
        """Return the question that waits, which waits no longer."""
        if self._timer is not None:
            self._timer.cancel()
        asked, self._asked, self._timer, self._soon = self._asked, None, None, False
        return asked

    def _answer_to(self, question: DebugQuestion) -> DebugAnswer:
        stop = self._stop_of(question)
        if stop is None:
            return DebugAnswer(question.worker, OVER if question.stop else FREE, question.stop)
        runs_s = stop.command.runs_s() if stop.line is None else 0.0
        if question.offset < 0 and stop.standing and not stop.over:  # nothing of what was said to others
            place = stop.standing.rpartition("\n")[0]
            output = stop.standing if stop.line is not None else f"{place}\n"
            offset = max(0, stop.end - len(output))
        else:
            offset = max(stop.step if question.offset < 0 else question.offset, stop.start)
            output = stop.kept[offset - stop.start :][:MAX_OUTPUT]
        rest = offset + len(output) < stop.end
        state = OVER if stop.over and not rest else WAITS
        asks = stop.line is not None and not rest and self._stops[0] is stop
        queued = len(self._stops) - (not stop.over)
        answer = DebugAnswer(question.worker, state, stop.number, stop.place, stop.thread, asks, output, offset, queued)
        return replace(answer, runs_s=runs_s)
