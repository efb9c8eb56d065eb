"""Asks workers that have not answered in time what their code is running, for the text of a timeout error."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from rlinf_actors.errors import CallTimeoutError
from rlinf_actors.runtime.future import Promise
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.pending import PendingRequest
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts

ANSWER_S = 0.25
"""Seconds that late workers get to answer what they run, after a wait for them has timed out."""
MAX_ASKED = 16
"""Maximum number of late workers that are asked and named in one error message."""


class LateReport(Promise[None]):
    """Asks workers that have not answered in time what their code is running, for the text of a timeout error.

    The promise resolves when every worker with a link has answered. Any thread.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        super().__init__("the answer of late workers")
        self._peers = peers
        asked = [peer for peer in peers[:MAX_ASKED] if peer.connected]
        self._left = len(asked) + 1
        self._runs: dict[Peer, frames.Runs] = {}
        requests = {peer: PendingRequest(partial(self._answered, peer), self._one_answered) for peer in asked}
        self._calls = {peer: peer.open(request) for peer, request in requests.items()}
        for peer, call in self._calls.items():
            peer.send(frames.WhatRuns(call), now=True)
        self._one_answered()

    def _answered(self, peer: Peer, frame: frames.AnyFrame, parts: AuthenticatedParts) -> None:
        if isinstance(frame, frames.Runs):
            self._runs[peer] = frame
        self._one_answered()

    def _one_answered(self, _error: Exception | None = None) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self.resolve(None)

    def describe(self) -> str:
        """Return a text that says what each worker is running, or that it does not answer. Ignore later answers."""
        for peer, call in self._calls.items():
            peer.pending.pop(call, None)
        texts = [f"{peer.name} on {peer.node} {self._text(peer)}" for peer in self._peers[:MAX_ASKED]]
        more = len(self._peers) - len(texts)
        return "; ".join([*texts, *([f"and {more} more"] if more else [])])

    def _text(self, peer: Peer) -> str:
        if peer not in self._calls:
            return "is not up yet"
        runs = self._runs.get(peer)
        if runs is None:
            why = "its process is stopped, C code holds its interpreter's lock, or it is an older version"
            return f"does not answer: {why}"
        waiting = ", and 1 call waits there" if runs.waiting == 1 else ""
        if runs.waiting > 1:
            waiting = f", and {runs.waiting} calls wait there"
        if not runs.method:
            return f"runs nothing{waiting}"
        return f"has been running {runs.method}() for {runs.seconds:.1f} s{waiting}"


def late_text(peers: Sequence[Peer], timeout: float) -> str:
    """Ask workers that have not answered in time what they are running; return a text for the timeout error.

    Blocks for at most ANSWER_S, or about *timeout*, the seconds that the caller has waited, if that is shorter.
    """
    report = LateReport(peers)
    with contextlib.suppress(CallTimeoutError):
        report.wait(min(ANSWER_S, max(timeout, 0.01)))  # a caller that polls is not held up
    return report.describe()
