"""Calls that are sent again: what ``group.with_retries(n)`` gives."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf_actors.errors import ConnectionLostError, EndedError, WorkerStartError
from rlinf_actors.group.result import Slot, WorkerGroupFuncResult
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames

if TYPE_CHECKING:
    from rlinf_actors.runtime.remote_group import RemoteGroup
    from rlinf_actors.runtime.runtime import Runtime

T = TypeVar("T")

WORKER_GONE = (EndedError, ConnectionLostError, WorkerStartError)
"""What a peer fails its calls by when the worker, or the connection to it, is gone. What a method raised comes as an
answer, and is never tried again.
"""


class RetriedResult(WorkerGroupFuncResult[T]):
    """The results of a call that is sent again to the worker that takes the place of one that died.

    When a worker is restarted, or the connection to it is made anew, the group has the new peer in its place before
    the calls of the old one fail (RemoteGroup._replace). So a failed call knows at once whether there is a successor:
    it is sent there, and waits there until the worker is up. Without a successor the call fails.

    Args:
        group: whose peers are called.
        retries: how often the call of each rank may be sent again.
    """

    _once = False

    def __init__(
        self,
        runtime: Runtime,
        method: str,
        peers: Sequence[Peer],
        timeout: float | None,
        group: RemoteGroup,
        retries: int,
    ) -> None:
        self._places = list(peers)
        super().__init__(runtime, method, self._places, timeout)
        self._group = group
        self._retries = retries
        self._tries = [1] * len(self._places)
        self._parts: Sequence[Sequence[Buffer]] = ()
        self._last: dict[int, Exception] = {}  # what the last tries failed by, which other calls may have failed by too
        self._end = 0.0 if timeout is None else time.monotonic() + timeout

    @property
    def attempts(self) -> list[int]:
        """How often the call was sent to each rank, in rank order: 1 without a failure."""
        return list(self._tries)

    @property
    def cause(self) -> Exception | None:
        """See runtime.lost.Failed."""
        return super().cause if self._failed is None else self._last.get(self._failed, super().cause)

    def _start(self, *parts: Sequence[Buffer]) -> None:
        self._parts = parts if len(parts) > 1 else parts * len(self._places)
        super()._start(*parts)

    def _arrived(self, index: int, answer: Any, failed: bool) -> None:
        if isinstance(answer, WORKER_GONE):
            if self._send_again(index):
                return
            self._last[index] = answer
            answer = self._counted(answer, self._tries[index])
        super()._arrived(index, answer, failed)

    def _send_again(self, index: int) -> bool:
        """Send one rank's call to the worker that is in the place of the last one. False if there is none."""
        left = self._end - time.monotonic() if self._end else 0.0
        with self._lock:
            given_up = self._cancelled or self._expired or self._answers[index] is not None
            old = self._places[index]
            new = self._group.peers[old.rank]
            if given_up or self._tries[index] > self._retries or left < 0 or new is old or new.error is not None:
                return False
            self._tries[index] += 1
            self._places[index] = new
        new.open(Slot(self, index), self._call)
        new.post(frames.encode(frames.Call(self._call, self._method, left)), self._parts[index], now=True, alone=False)
        if self._cancelled or self._expired:  # since the look above: who gave up did not find this peer
            new.forget(self._call)
        return True

    def _counted(self, error: Exception, tries: int) -> Exception:
        """Return the error of the last try; its message says how many there were."""
        if tries == 1:
            return error
        counted = copy.copy(error)  # the calls that were sent once have the original
        counted.args = (f"{self._method}() was sent {tries} times; the last time: {error}", *error.args[1:])
        return counted
