"""RetriedResult: the result of a call that is sent again after the death of a worker, for ``group.with_retries(n)``."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf_actors.errors import ConnectionLostError, EndedError, WorkerStartError
from rlinf_actors.group.result import RankCall, WorkerGroupFuncResult
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames

if TYPE_CHECKING:
    from rlinf_actors.runtime.remote_group import RemoteGroup
    from rlinf_actors.runtime.runtime import Runtime

T = TypeVar("T")

WORKER_GONE = (EndedError, ConnectionLostError, WorkerStartError)
"""Errors with which a Peer fails its calls when the worker, or the connection to it, is gone.

Exceptions that a method raises arrive as answers and never cause a retry.
"""


class RetriedResult(WorkerGroupFuncResult[T]):
    """The results of a call through `with_retries`: if a worker dies, the call is sent again to the restarted worker.

    If a worker is restarted, or its connection is re-established, RemoteGroup gives the rank a new Peer, and then fails
    the calls of the old Peer. So a failed call is sent through the new Peer at once, and waits there until the worker
    runs. If the rank has no new Peer, because the worker is not restarted, the call fails.

    Args:
        group: the group that is called.
        retries: number of times that the call of each rank may be sent again.
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
        self._last: dict[int, Exception] = {}  # by index the error of the last try, which other calls may share
        self._end = 0.0 if timeout is None else time.monotonic() + timeout

    @property
    def attempts(self) -> list[int]:
        return list(self._tries)

    @property
    def cause(self) -> Exception | None:
        return super().cause if self._failed is None else self._last.get(self._failed, super().cause)

    def _start(self, *parts: Sequence[Buffer]) -> None:
        self._parts = parts if len(parts) > 1 else parts * len(self._places)
        super()._start(*parts)

    def _arrived(self, index: int, answer: Any, failed: bool) -> None:
        if isinstance(answer, WORKER_GONE):
            if self._send_again(index):
                return
            self._last[index] = answer
            if (tries := self._tries[index]) > 1:
                counted = copy.copy(answer)  # calls that were sent once share the original
                counted.args = (f"{self._method}() was sent {tries} times; the last time: {answer}", *answer.args[1:])
                answer = counted
        super()._arrived(index, answer, failed)

    def _send_again(self, index: int) -> bool:
        """Send the call again to a rank whose worker has died or lost its connection.

        *index* is the place of the rank in the results. Return False if the call cannot be sent again: it has ended, no
        try is left, or the rank has no new Peer.
        """
        left = self._end - time.monotonic() if self._end else 0.0
        with self._lock:
            ended = self._error is not None or index in self._answers
            old = self._places[index]
            peers = self._group.peers
            new = peers[old.rank] if old.rank < len(peers) else old
            if ended or self._tries[index] > self._retries or left < 0 or new is old or new.error is not None:
                return False
            self._tries[index] += 1
            self._places[index] = new
        new.open(RankCall(self, index), self._call)
        new.post(frames.encode(frames.Call(self._call, self._method, left)), self._parts[index], now=True, alone=False)
        if self._error is not None:  # cancelled or expired since the check above, which did not find this peer
            new.forget(self._call)
        return True
