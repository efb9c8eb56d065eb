"""How the process that launched a group constructs the workers, and how other processes wait until a group is ready.

The answers of the workers arrive on the loop thread. A Readiness may be waited for on any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rlinf_actors.errors import CallTimeoutError, GroupClosedError, WorkerStartError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.future import Promise, call_all
from rlinf_actors.runtime.late_report import late_text
from rlinf_actors.runtime.lost_errors import LostErrors
from rlinf_actors.runtime.peer import Peer, new_call
from rlinf_actors.runtime.pending import PendingRequest
from rlinf_actors.wire import failure, frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.values import Extension, WorkerState

if TYPE_CHECKING:
    from rlinf_actors.runtime.remote_group import RemoteGroup


class Readiness(Promise[None]):
    """The promise that a launched group gets ready; only the process that launched the group has one.

    The promise resolves when all workers are constructed. If one worker fails, the promise fails with the worker's
    error, and so does every call on the group. If neither the launching code nor a call raises that error, LostErrors
    reports it. The class has the members of lost_errors.FailedOperation, which LostErrors needs for this.
    """

    shared = True

    def __init__(self, name: str, lost: LostErrors, late: Callable[[], Sequence[Peer]] = tuple) -> None:
        super().__init__(f"group {name!r}")
        self._late_ranks = late
        self.loop = asyncio._get_running_loop()
        self._lost = lost
        self._unseen = False
        self._watchers: tuple[Callable[[], object], ...] = ()

    def watch(self, callback: Callable[[], object]) -> None:
        """Call *callback* when the launch has ended; at once if it has. Any thread.

        Unlike who waits, a watcher does not get the error: LostErrors reports an error that only watchers learn of.
        """
        with self._lock:
            if not self._finished:
                self._watchers = (*self._watchers, callback)
                return
        callback()

    def _finish(self, value: Any = None, error: BaseException | None = None) -> bool:
        ended = super()._finish(value, error)
        if ended:
            watchers, self._watchers = self._watchers, ()
            call_all(watchers)
        return ended

    def reject(self, error: BaseException) -> bool:
        awaited = bool(self._callbacks)
        ended = super().reject(error)
        if ended and not isinstance(error, GroupClosedError):  # the owner itself shut the group down
            self._unseen = True
            self._lost.failed(self, awaited=awaited)
        return ended

    def _ranks(self) -> tuple[Sequence[Peer], Sequence[Peer]]:
        return self._late_ranks(), ()

    def _timeout_error(self, timeout: float) -> CallTimeoutError:
        late = late_text(self._late_ranks(), timeout)
        return CallTimeoutError(f"{self._what} was not ready within {timeout:g} s; it goes on: {late}")

    def seen(self) -> None:
        """Record that a caller got the error of the launch, so that LostErrors does not report it."""
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


class Construction(msgspec.Struct):
    """The class, arguments and options with which the process that launched a group constructs the workers.

    Attributes:
        cls: "module:qualname" of the worker class, or "" if *parts* contain the class itself.
        parts: the pickled constructor arguments, with the class if workers cannot import it; the same for all ranks.
        max_concurrency: number of threads that run calls if the class has no ``async def``; 0: the main thread does.
        extensions: modules that register the hardware types of the workers.
        preload: modules that the template of the workers imports before it forks the first one.
        again: True if failed workers are restarted, and therefore constructed again.
        detach: True if the head becomes the owner of the group when all workers are constructed.
        constructed: worker id of each constructed worker, by rank.
        growable: True if *parts* are kept after the launch, so that ranks can be added.
        grow: a `group.resizing.Grower`, which places more ranks; None if no ranks can be added.
        lost: reports the error of a launch that failed while no code waited; None if the launching code always waits.
    """

    cls: str
    parts: Sequence[Buffer]
    max_concurrency: int
    extensions: Sequence[Extension] = ()
    preload: Sequence[str] = ()
    again: bool = False
    detach: bool = False
    constructed: dict[int, str] = msgspec.field(default_factory=dict)
    lost: LostErrors | None = None
    growable: bool = False
    grow: Any = None
    _created: tuple[tuple[str, int], int, bytes] = (("", 0), 0, b"")

    def create(self, first: WorkerState) -> tuple[int, bytes]:
        """Return the number and the encoded header of the Create, which are the same for all workers of the group.

        *first* is the state of rank 0, which has MASTER_PORT.
        """
        key = (first.node_ip, first.master_port)
        if self._created[0] != key:
            call = new_call()
            env = {"MASTER_ADDR": first.node_ip, "MASTER_PORT": str(first.master_port)}
            frame = frames.Create(call, self.cls, env, self.max_concurrency, list(self.extensions))
            self._created = (key, call, frames.encode(frame))
        return self._created[1:]


class Inquiry:
    """Asks the workers of *group*, which another process constructs, to report when they are constructed. Loop thread.

    Attributes:
        requested: True if `ask` is to be called when the head has described the workers.
    """

    def __init__(self, group: RemoteGroup) -> None:
        self.requested = False
        self._group = group
        self._unready: set[int] = set()  # ranks that have not answered

    def ask(self) -> None:
        """Ask each living worker. Do nothing if the workers were asked already."""
        group = self._group
        if not group.found:
            self.requested = True
            group.look_up()
        elif not group.ready.done() and not self._unready:
            alive = [peer for peer in group.peers if peer.error is None]
            ends = [peer.error for peer in group.peers if peer.error is not None]
            if not alive:
                group.ready.reject(ends[0])
            self._unready = {peer.rank for peer in alive}
            for peer in alive:
                self._ask_worker(peer)

    def _ask_worker(self, peer: Peer) -> None:
        request = PendingRequest(partial(self._answered, peer), partial(self._ended, peer))
        peer.send(frames.WhatRuns(peer.open(request), True), now=True)

    def _answered(self, peer: Peer, frame: frames.AnyFrame, _parts: AuthenticatedParts) -> None:
        error = None
        if isinstance(frame, frames.Raised):  # the owner gets the exception itself, and ends the group
            text = failure.describe(frame, "__init__", worker=peer.name, node=peer.node)
            error = WorkerStartError(text, worker=peer.name, node=peer.node)
        self._ended(peer, error)

    def _ended(self, peer: Peer, error: Exception | None) -> None:
        """Handle the answer of a worker. Any thread.

        Args:
            peer: the worker's Peer.
            error: None if the worker is constructed; else why it is not. If the error came because the worker was
                restarted or its connection was lost, the worker is asked again.
        """
        group = self._group
        removed = peer.rank >= len(group.peers)  # the group does not need that rank any more
        successor, error = (peer, None) if removed else (group.peers[peer.rank], error)
        if error is not None and successor is not peer and successor.error is None and not group.ready.done():
            self._ask_worker(successor)  # it was restarted, or its connection was made anew
        elif error is not None:
            group.ready.reject(error)
        else:
            self._unready.discard(peer.rank)
            if not self._unready:
                group.ready.resolve(None)


def unpickle_exception(
    peer: Peer, frame: frames.Raised, parts: AuthenticatedParts, then: Callable[[Exception], object]
) -> None:
    """Call *then* with the exception that a constructor raised. Unpickling runs user code: not on this thread."""
    decoding = asyncio.get_running_loop().run_in_executor(None, peer.exception, frame, parts)

    def decoded(decoding: asyncio.Future[Exception]) -> None:
        if not decoding.cancelled():
            error = decoding.exception()
            then(error if isinstance(error, Exception) else decoding.result())

    decoding.add_done_callback(decoded)
