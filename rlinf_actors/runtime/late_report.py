"""Asks workers that have not answered in time what they run and wait for, for the text of a timeout error.

The question goes on to the workers that these wait for, as far as this process is connected to them: so the text names
a deadlock, or the worker at the end of a chain of waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rlinf_actors.errors import CallTimeoutError
from rlinf_actors.model.readable import duration
from rlinf_actors.plurals import counted
from rlinf_actors.runtime import wait_graph
from rlinf_actors.runtime.future import Promise
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.pending import PendingRequest
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import printable
from rlinf_actors.wire.stack_values import Wait

ANSWER_S = 0.5
"""Seconds that late workers get to answer what they run, after a wait for them has timed out."""
MAX_ASKED = 16
"""Maximum number of late workers that are asked and named in one text, and of workers that these wait for."""
ROUNDS = 4
"""Most times that the workers are asked for which the workers of the last time wait."""
SHOWN_WAITS = 3
"""Most waits of one worker in a text."""

Find = Callable[[str], "Peer | None"]
"""Returns the connection to a worker of the job, given by its name; None if this process has none."""


class LateReport(Promise[None]):
    """Asks workers that have not answered in time what they run and wait for.

    The promise resolves when every worker with a link has answered. Any thread. If *only_busy*, the text leaves out
    workers that run no call. If *connect*, a link is made to workers that have none; else they are not asked.
    """

    def __init__(
        self, peers: Sequence[Peer], find: Find = lambda name: None, only_busy: bool = False, connect: bool = False
    ) -> None:
        super().__init__("the answer of late workers")
        self._peers = peers
        self._find = find
        self._only_busy = only_busy
        self._runs: dict[Peer, frames.Runs] = {}
        self._calls: dict[Peer, int] = {}
        self._further: list[Peer] = []
        self._connect = connect
        self._rounds = 0
        self._left = 0
        self._ask(peers[:MAX_ASKED])

    def _ask(self, peers: Iterable[Peer]) -> None:
        asked = [peer for peer in peers if peer.connected or self._connect]
        self._left = len(asked) + 1
        self._rounds += 1
        requests = {peer: PendingRequest(partial(self._answered, peer), self._one_answered) for peer in asked}
        calls = {peer: peer.open(request) for peer, request in requests.items()}
        self._calls.update(calls)
        for peer, call in calls.items():
            peer.send(frames.WhatRuns(call, waits=True), now=True)
        self._one_answered()

    def _answered(self, peer: Peer, frame: frames.AnyFrame, parts: AuthenticatedParts) -> None:
        if isinstance(frame, frames.Runs):
            self._runs[peer] = frame
        self._one_answered()

    def _one_answered(self, _error: Exception | None = None) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if not last:
            return
        further = self._not_asked() if self._rounds < ROUNDS else []
        if further:
            self._further += further
            self._ask(further)
        else:
            self.resolve(None)

    def _not_asked(self) -> list[Peer]:
        """Return the workers for which the asked ones wait."""
        known = {peer.name for peer in (*self._peers, *self._further)}
        names = dict.fromkeys(name for runs in list(self._runs.values()) for wait in runs.waits for name in wait.on)
        found = [self._find(name) for name in names if name not in known]
        room = MAX_ASKED - len(self._further)
        return [peer for peer in found if peer is not None and peer.connected and peer not in self._calls][:room]

    def waits(self) -> dict[str, Sequence[Wait]]:
        """Return what the workers that have answered wait for, by their names."""
        runs = self._runs.copy()
        return {peer.name: runs[peer].waits for peer in (*self._peers, *self._further) if peer in runs}

    def describe(self) -> str:
        """Return a text that says what each worker is running, or that it does not answer. Ignore later answers.

        A deadlock comes first.
        """
        self.end()
        cycles = [cycle for cycle in wait_graph.cycles(self.waits()) if cycle.deadlock]
        locked = {step.worker for cycle in cycles for step in cycle.steps}
        texts = [
            "deadlock: " + ", ".join(f"{step.worker} waits in {_wait_text(step.wait)}" for step in cycle.steps)
            for cycle in cycles
        ]
        for peer in (*self._peers[:MAX_ASKED], *self._further):
            if peer.name not in locked and not (self._only_busy and self._is_idle(peer)):
                texts.append(f"{peer.name} on {peer.node} {self._text(peer)}")
        more = len(self._peers[MAX_ASKED:])
        return "; ".join([*texts, *([f"and {more} more"] if more else [])])

    def end(self) -> None:
        """Ignore answers that come later."""
        for peer, call in list(self._calls.items()):
            peer.pending.pop(call, None)

    def _is_idle(self, peer: Peer) -> bool:
        runs = self._runs.get(peer)
        return peer not in self._calls or (runs is not None and not runs.method)

    def _text(self, peer: Peer) -> str:
        if peer not in self._calls:
            return "is not up yet"
        runs = self._runs.get(peer)
        if runs is None:
            return "does not answer: its process is stopped, or C code holds its interpreter's lock"
        waiting = f", and {counted(runs.waiting, 'call', 'waits|wait')} there" if runs.waiting else ""
        if not runs.method:
            return f"runs nothing{waiting}"
        waits = "".join(f", waits in {_wait_text(wait)}" for wait in runs.waits[:SHOWN_WAITS])
        return f"has been running {runs.method}() for {runs.seconds:.1f} s{waits}{waiting}"


def _wait_text(wait: Wait) -> str:
    return f"{printable(wait.what)} ({duration(wait.seconds)})"


def late_text(peers: Sequence[Peer], timeout: float, find: Find = lambda name: None, connect: bool = False) -> str:
    """Ask workers that have not answered in time what they are running; return a text for the timeout error.

    Blocks for at most ANSWER_S, or about *timeout*, the seconds that the caller has waited, if that is shorter.
    """
    report = LateReport(peers, find, connect=connect)
    with contextlib.suppress(CallTimeoutError):
        report.wait(min(ANSWER_S, max(timeout, 0.01)))  # a caller that polls is not held up
    return report.describe()
