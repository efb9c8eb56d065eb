"""How the process that launched a group constructs the workers, and how other processes wait until a group is ready.

The answers of the workers arrive on the loop thread. A Readiness may be waited for on any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlinf_actors.errors import CallTimeoutError, GroupClosedError, WorkerStartError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.future import Promise
from rlinf_actors.runtime.lost_errors import LostErrors
from rlinf_actors.runtime.peer import ANSWER_S, LateReport, Peer
from rlinf_actors.wire import failure, frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.values import Extension

if TYPE_CHECKING:
    from rlinf_actors.runtime.remote_group import RemoteGroup


class Readiness(Promise[None]):
    """A Promise that ends when all workers of a group that this process launched are constructed, or one has failed.

    LostErrors reports the error if no caller sees it. All calls on the group fail with the same error object, so the
    error counts as seen when any of them raises it. LostErrors reads `shared`, `loop`, `cause`, `raised` and
    `describe`; see lost_errors.FailedOperation.
    """

    shared = True

    def __init__(self, name: str, lost: LostErrors, late: Callable[[], Sequence[Peer]] = tuple) -> None:
        super().__init__(f"group {name!r}")
        self._late_ranks = late
        self.loop = asyncio._get_running_loop()
        self._lost = lost
        self._unseen = False

    def reject(self, error: BaseException) -> bool:
        awaited = bool(self._callbacks)
        ended = super().reject(error)
        if ended and not isinstance(error, GroupClosedError):  # the owner itself shut the group down
            self._unseen = True
            self._lost.failed(self, awaited=awaited)
        return ended

    def _timeout_error(self, timeout: float) -> CallTimeoutError:
        report = LateReport(self._late_ranks())
        with contextlib.suppress(CallTimeoutError):
            report.wait(min(ANSWER_S, max(timeout, 0.01)))  # a caller that polls is not held up
        return CallTimeoutError(f"{self._what} was not ready within {timeout:g} s; it goes on: {report.describe()}")

    def seen(self) -> None:
        """Record that a caller got the error, so that LostErrors does not report it."""
        if self._unseen:
            self._unseen = False
            self._lost.seen(self)

    def _outcome(self) -> None:
        self.seen()
        return super()._outcome()

    @property
    def cause(self) -> Exception | None:
        return self._error if isinstance(self._error, Exception) else None

    def raised(self) -> Exception:
        assert isinstance(self._error, Exception)
        return self._error

    def describe(self) -> str:
        return f"{self._what} could not be brought up: {self._error}"

    def __del__(self) -> None:
        if self._unseen:
            self._lost.collected(self)


def decode_failure(raised: frames.Raised, parts: AuthenticatedParts, peer: Peer) -> Exception:
    """Return the exception that a worker raised. This unpickles, so it must not run on the loop thread."""
    return failure.decode(raised, parts, worker=peer.name, rank=peer.rank, node=peer.node)


@dataclass
class Construction:
    """What the process that launched a group needs to construct its workers.

    Attributes:
        cls: "module:qualname" of the worker class, or "" if *parts* contain the class itself.
        parts: the encoded payload (class or None, args, kwargs, extras). Encoded once and shared by all ranks.
        max_concurrency: number of threads for a class without ``async def``; 0 to use the main thread.
        decode_failure: turns a Raised frame into an exception; runs on an executor thread.
        extensions: modules that register the hardware types of the workers.
        again: True if failed workers are restarted, and therefore constructed again.
        detach: True if this process gives up ownership of the group when all workers are constructed.
        constructed: worker id of each constructed worker, by rank.
        lost: reports the error of a group that cannot come up; None if the launching code always waits for the group.
    """

    cls: str
    parts: Sequence[Buffer]
    max_concurrency: int
    decode_failure: Callable[[frames.Raised, AuthenticatedParts, Peer], Exception] = decode_failure
    extensions: Sequence[Extension] = ()
    again: bool = False
    detach: bool = False
    constructed: dict[int, str] = field(default_factory=dict)
    lost: LostErrors | None = None


class CreateCall:
    """A Create that waits for the worker's answer (peer.Pending)."""

    def __init__(self, group: RemoteGroup, peer: Peer, construction: Construction) -> None:
        self._group = group
        self._peer = peer
        self._construction = construction

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        if isinstance(frame, frames.Raised):
            # unpickling runs user code: not on this thread
            decoding = asyncio.get_running_loop().run_in_executor(
                None, self._construction.decode_failure, frame, parts, self._peer
            )
            decoding.add_done_callback(self._decoded)
        else:
            self._group.constructed(self._peer)
        return True

    def fail(self, error: Exception) -> None:
        if self._group.peers[self._peer.rank] is self._peer:  # else the worker was restarted, and is constructed then
            self._group.construction_failed(error)

    def _decoded(self, decoding: asyncio.Future[Exception]) -> None:
        if not decoding.cancelled():
            error = decoding.exception()
            self._group.construction_failed(error if isinstance(error, Exception) else decoding.result())
            self._peer.release()  # if the group is up already, a rank that is constructed again fails its own calls


class ReadyRequest:
    """A request to a worker of another process's group to answer when it is constructed (peer.Pending)."""

    def __init__(self, group: RemoteGroup, peer: Peer) -> None:
        self._group = group
        self._peer = peer

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        error = None
        if isinstance(frame, frames.Raised):  # the owner gets the exception itself, and ends the group
            text = failure.describe(frame, "__init__", worker=self._peer.name, node=self._peer.node)
            error = WorkerStartError(text, worker=self._peer.name, node=self._peer.node)
        self._group.worker_ready(self._peer, error)
        return True

    def fail(self, error: Exception) -> None:
        self._group.worker_ready(self._peer, error)
