"""What a call on a group gives back: awaitable, waitable, one value per rank.

Calls that are sent again: what ``group.with_retries(n)`` gives.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Union, overload

from rlinf_actors.errors import (
    CallTimeoutError,
    ConnectionLostError,
    EndedError,
    GroupClosedError,
    SerializationError,
    UsageError,
    WorkerStartError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.loop import call_threadsafe
from rlinf_actors.runtime.future import AsyncWork, Future, Promise, call_all
from rlinf_actors.runtime.peer import ANSWER_S, Late, Peer, new_call
from rlinf_actors.wire import failure, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts

if TYPE_CHECKING:
    from rlinf_actors.runtime.remote_group import RemoteGroup
    from rlinf_actors.runtime.runtime import Runtime

T = TypeVar("T")


@dataclass(frozen=True)
class _Value:
    """An answer that was unpickled."""

    value: Any
    seconds: float


_Answer = Union[tuple[frames.AnyFrame, AuthenticatedParts], _Value, Exception, None]

REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
}


class Slot:
    """One rank's place in a result; what the peer keeps while the call is under way."""

    __slots__ = ("_index", "_result")

    def __init__(self, result: WorkerGroupFuncResult[Any], index: int) -> None:
        self._result = result
        self._index = index

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """The rank answered. Loop thread."""
        self._result._arrived(self._index, (frame, parts), type(frame) is not frames.Ok)
        return True

    def fail(self, error: Exception) -> None:
        """The rank will not answer. Any thread."""
        self._result._arrived(self._index, error, True)


class WorkerGroupFuncResult(Future["list[T]"], Generic[T]):
    """The results of one call on some ranks of a group, in rank order.

    It ends when all ranks answered, or at the first failure in time, without waiting for ranks
    that may be stuck in a collective with the failed one. The values are unpickled by the thread
    that waits. ``await`` and ``wait`` may be used many times, from any thread and any loop;
    cancelling a task that awaits it does not cancel the call (`cancel` does).
    """

    # defaults of the class: a call sets few of them, and there may be 100,000 calls a second
    _call = 0
    _failed: int | None = None
    _watchers: tuple[Callable[[], object], ...] = ()
    _timer: asyncio.TimerHandle | None = None
    _cancelled = False
    _expired = False
    _doing = ""  # what the late ranks did when the time was up
    _unseen = False  # failed, and no caller has been given the error
    _beside = False  # the method has threads of its own (Worker.concurrent)
    _once = True  # the arguments are sent to each worker once, so the only one may change them where they lie
    loop: asyncio.AbstractEventLoop | None = None
    shared = False

    def __init__(self, runtime: Runtime, method: str, peers: Sequence[Peer], timeout: float | None = None) -> None:
        super().__init__(method)
        self._runtime = runtime
        self._method = method
        self._peers = peers
        self._timeout = timeout
        self._answers: list[_Answer] = [None] * len(peers)
        self._order: list[int] = []
        loop = asyncio._get_running_loop()
        if loop is not None:
            self.loop = loop

    def __reduce__(self) -> Any:
        raise SerializationError(
            f"it is the result of {self._method}(), which was not awaited, and not its values: await it first, as in "
            f"group.step(await other.{self._method}()), or call wait() on it"
        )

    # --- sending (the caller's thread) ---

    def _start(self, *parts: Sequence[Buffer]) -> None:
        """Send the call: the same arguments to every rank, or to each its own."""
        call = self._call = new_call()
        header = frames.encode(frames.Call(call, self._method, self._timeout or 0.0))
        for index, peer in enumerate(self._peers):
            idle = not peer.pending
            peer.open(Slot(self, index), call)
            own = len(parts) > 1 or len(self._peers) == 1
            peer.post(header, parts[index] if own else parts[0], now=idle, alone=self._once and own)
        if self._timeout is not None:
            self._runtime.io.call(self._arm, self._timeout)

    def _arm(self, seconds: float) -> None:
        """Start the deadline's timer: until every rank has answered, also after the first failure. Loop thread."""
        if len(self._order) < len(self._peers):
            self._timer = self._runtime.io.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        """The time is up: end the call where it runs, and say what ran there. The question overtakes nothing."""
        late: list[Late] = []

        def told() -> None:
            self._runtime.io.call(self._over, late)

        late.append(Late(self._missing(), told))
        for peer in self._peers:
            peer.forget(self._call)
        self._timer = self._runtime.io.loop.call_later(ANSWER_S, self._over, late)

    def _over(self, late: list[Late]) -> None:
        """The late ranks have said what they do, or had the time for it. Loop thread."""
        if self._timer is not None:
            self._timer.cancel()
        doing = late[0].describe()
        with self._lock:
            if self._expired:
                return
            self._expired, self._doing = True, doing
            if not self._finished:
                self._fail(bool(self._callbacks))  # before anyone can take the error, and say that it was seen
        self._give_up()

    def _missing(self) -> list[Peer]:
        return [peer for peer, answer in zip(self._peers, self._answers, strict=True) if answer is None]

    def _timeout_error(self, timeout: float) -> CallTimeoutError:
        asked = threading.Event()
        late = Late(self._missing(), asked.set)
        asked.wait(min(ANSWER_S, max(timeout, 0.01)))  # who polls is not held up
        group = self._peers[0].name.rpartition(":")[0]
        return CallTimeoutError(
            f"{self._method}() of group {group!r} was not done within {timeout:g} s; it goes on: {late.describe()}"
        )

    def _give_up(self) -> bool:
        """Nobody waits for the ranks that have not answered; True if that is how the call ended."""
        for peer in self._peers:
            peer.forget(self._call)
        ended = self._finish()
        call_all(self._watchers)
        return ended

    # --- answers (loop thread, or the thread that finds the peer dead) ---

    def _arrived(self, index: int, answer: _Answer, failed: bool) -> None:
        with self._lock:
            if self._answers[index] is not None:
                return
            self._answers[index] = answer
            self._order.append(index)
            if failed and self._failed is None and not self._finished:
                self._failed = index
            callbacks: tuple[Callable[[], object], ...] = ()
            if not self._finished and (len(self._order) == len(self._peers) or failed):
                if self._failed == index and not isinstance(answer, GroupClosedError):  # that is the caller's own doing
                    self._fail(bool(self._callbacks))
                self._finished = True
                callbacks, self._callbacks = self._callbacks, ()
        call_all(callbacks)
        call_all(self._watchers)
        if self._timer is not None and len(self._order) == len(self._peers):
            self._runtime.io.call(self._timer.cancel)

    def _fail(self, awaited: bool) -> None:
        self._unseen = True
        self._runtime.lost.failed(self, awaited=awaited)

    def _outcome(self) -> list[T]:
        self._mark_seen()
        if self._failed is not None:
            # one error may be raised many times (of a dead worker: by every call): its traceback must not grow
            raise self._failure(self._failed).with_traceback(None)
        if len(self._order) < len(self._peers):
            raise self._unanswered()
        return [self._value(index) for index in range(len(self._peers))]

    def _unanswered(self) -> Exception:
        """Why ranks have not answered though the call has ended."""
        if self._cancelled:
            return concurrent.futures.CancelledError(f"the call of {self._method}() was cancelled")
        missing = ", ".join(peer.name for peer in self._missing())
        return CallTimeoutError(
            f"{self._method}() had {self._timeout:g} s and did not return from {missing}: {self._doing}"
        )

    def _value(self, index: int) -> T:
        """One rank's value; unpickled once, by the first thread that asks."""
        with self._lock:
            answer = self._answers[index]
            if isinstance(answer, _Value):
                value: T = answer.value
                return value
            assert isinstance(answer, tuple)
            try:
                value = payload.decode(answer[1])
            except Exception as error:
                peer = self._peers[index]
                raise failure.unreadable("the result", self._method, peer.name, peer.node, error) from error
            assert isinstance(answer[0], frames.Ok)
            self._answers[index] = _Value(value, answer[0].seconds)
            return value

    def _failure(self, index: int) -> Exception:
        answer = self._answers[index]
        if isinstance(answer, Exception):
            return answer
        assert isinstance(answer, tuple)
        frame, parts = answer
        assert isinstance(frame, frames.Raised)
        peer = self._peers[index]
        error = failure.decode(frame, parts, worker=peer.name, rank=peer.rank, node=peer.node)
        self._answers[index] = error
        return error

    # --- the caller's side ---

    @property
    def attempts(self) -> list[int]:
        """How often the call was sent to each rank, in rank order: more than once only through `with_retries`."""
        return [1] * len(self._peers)

    def cancel(self) -> bool:
        """Give the call up: dropped where it is queued, cancelled where it is a coroutine.

        A method that is running on a thread runs to its end; its result is discarded.

        Returns:
            False if the result was already there. After the first failure it still ends the other ranks' calls.
        """
        with self._lock:
            if len(self._order) == len(self._peers) or self._expired:
                return False
            self._cancelled = True
        return self._give_up()

    def cancelled(self) -> bool:
        """Whether `cancel` ended it."""
        return self._cancelled

    def exception(self) -> BaseException | None:
        """Return the error that `wait` raises, None if the call succeeded or is not done. Counts as looked at."""
        if self._failed is None and (not self._finished or len(self._order) == len(self._peers)):
            return None
        self._mark_seen()
        return self._unanswered() if self._failed is None else self._failure(self._failed)

    @overload
    def as_completed(self, return_exceptions: Literal[False] = False) -> AsyncGenerator[tuple[int, T], None]: ...
    @overload
    def as_completed(self, return_exceptions: bool) -> AsyncGenerator[tuple[int, T | Exception], None]: ...
    async def as_completed(self, return_exceptions: bool = False) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield ``(rank, value)`` as the ranks answer.

        Args:
            return_exceptions: yield ``(rank, error)`` for a rank that failed and go on; else raise it.
        """
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()

        def notify() -> None:
            call_threadsafe(loop, wake.set)

        with self._lock:
            self._watchers = (*self._watchers, notify)
        self._on_done(notify)
        try:
            for n in range(len(self._peers)):
                while len(self._order) <= n:
                    if self._cancelled or self._expired:
                        self._mark_seen()
                        raise self._unanswered()
                    await wake.wait()
                    wake.clear()
                index = self._order[n]
                if self._succeeded(index):
                    yield self._peers[index].rank, self._value(index)
                    continue
                self._mark_seen()
                if not return_exceptions:
                    raise self._failure(index)
                yield self._peers[index].rank, self._failure(index)
        finally:
            with self._lock:
                self._watchers = tuple(watcher for watcher in self._watchers if watcher is not notify)
            self._forget(notify)

    @overload
    def consume_duration(self, reduction_type: str = "max", async_op: Literal[False] = False) -> float: ...

    @overload
    def consume_duration(self, reduction_type: str = "max", *, async_op: Literal[True]) -> AsyncWork[float]: ...

    def consume_duration(self, reduction_type: str = "max", async_op: bool = False) -> float | AsyncWork[float]:
        """Return how long the method ran, in seconds, reduced over the ranks. Waits for the result first.

        Args:
            reduction_type: max, min, mean or sum.
            async_op: return an AsyncWork at once; else block.

        Raises:
            ValueError: there is no such *reduction_type*. Also what the call raised.
        """
        reduce = _reduction(reduction_type)
        work = AsyncWork.made_of(self, lambda _: reduce(self._durations()), f"consume_duration() of {self._method}()")
        return work if async_op else work.wait()

    @overload
    def consume_durations(
        self, reduction_type: str = "max", return_per_rank: Literal[False] = False, async_op: Literal[False] = False
    ) -> dict[str, float]: ...
    @overload
    def consume_durations(
        self, reduction_type: str = "max", *, return_per_rank: Literal[True], async_op: Literal[False] = False
    ) -> tuple[dict[str, float], dict[str, list[float]]]: ...
    @overload
    def consume_durations(
        self, reduction_type: str, return_per_rank: Literal[True], async_op: Literal[False] = False
    ) -> tuple[dict[str, float], dict[str, list[float]]]: ...
    @overload
    def consume_durations(
        self, reduction_type: str = "max", return_per_rank: Literal[False] = False, *, async_op: Literal[True]
    ) -> AsyncWork[dict[str, float]]: ...
    @overload
    def consume_durations(
        self, reduction_type: str = "max", *, return_per_rank: Literal[True], async_op: Literal[True]
    ) -> AsyncWork[tuple[dict[str, float], dict[str, list[float]]]]: ...
    def consume_durations(
        self, reduction_type: str = "max", return_per_rank: bool = False, async_op: bool = False
    ) -> Any:
        """Return all durations the workers recorded by timer tag, and forget them there. Waits for the result first.

        Args:
            reduction_type: max, min, mean or sum.
            return_per_rank: return the durations of the ranks too.
            async_op: return an AsyncWork at once; else block.

        Returns:
            ``{tag: seconds}`` reduced over the ranks; with *return_per_rank* a pair of that and
            ``{tag: [seconds of each rank that has the tag]}``. The method itself is a tag too.

        Raises:
            ValueError: there is no such *reduction_type*. Also what the call raised.
        """
        reduce = _reduction(reduction_type)
        timers: WorkerGroupFuncResult[dict[str, float]] = WorkerGroupFuncResult(
            self._runtime, "pop_execution_times", self._peers
        )

        ended: Promise[None] = Promise(timers._method)

        def ask() -> None:
            try:
                if self._failed is None and len(self._order) == len(self._peers):
                    timers._start(())
                    timers._on_done(lambda: ended.resolve(None))
                else:
                    ended.resolve(None)
            except Exception as error:  # noqa: BLE001 - it reaches the waiter
                ended.reject(error)

        self._on_done(ask)

        def reduced(_: None) -> Any:
            self._outcome()  # raises what the call raised, and then no timers were asked for
            per_rank: dict[str, list[float]] = {self._method: self._durations()}
            for times in timers._outcome():
                for tag, seconds in times.items():
                    if tag != self._method:
                        per_rank.setdefault(tag, []).append(seconds)
            all_ranks = {tag: reduce(values) for tag, values in per_rank.items()}
            return (all_ranks, per_rank) if return_per_rank else all_ranks

        if not async_op:
            self.wait()  # refuses to wait for what this thread has to do itself
        what = f"consume_durations() of {self._method}()"
        work = AsyncWork.made_of(ended, reduced, what)
        return work if async_op else work.wait()

    def _durations(self) -> list[float]:
        """Of a call that succeeded."""
        seconds = []
        for answer in self._answers:
            if isinstance(answer, _Value):
                seconds.append(answer.seconds)
            elif isinstance(answer, tuple) and isinstance(answer[0], frames.Ok):
                seconds.append(answer[0].seconds)
        return seconds

    def _succeeded(self, index: int) -> bool:
        answer = self._answers[index]
        return isinstance(answer, _Value) or (isinstance(answer, tuple) and isinstance(answer[0], frames.Ok))

    def _check_blocking(self) -> None:
        self._runtime.check_usable()
        if not self._beside:
            refuse_own(self._runtime, self._method, self._missing())

    def _mark_seen(self) -> None:
        if self._unseen:
            self._unseen = False
            self._runtime.lost.seen(self)

    @property
    def cause(self) -> Exception | None:
        """See runtime.lost.Failed."""
        answer = None if self._failed is None else self._answers[self._failed]
        return answer if isinstance(answer, Exception) else None

    def raised(self) -> Exception:
        """The error as `wait` raises it, without counting as looked at."""
        return self._unanswered() if self._failed is None else self._failure(self._failed)

    def describe(self) -> str:
        """The error as one text, for the log."""
        if self._failed is None:
            return str(self._unanswered())
        answer, peer = self._answers[self._failed], self._peers[self._failed]
        frame = answer[0] if isinstance(answer, tuple) else answer
        assert isinstance(frame, (frames.Raised, Exception))
        return failure.describe(frame, self._method, worker=peer.name, node=peer.node)

    def __del__(self) -> None:
        if self._unseen:
            self._runtime.lost.collected(self)

    def __repr__(self) -> str:
        state = "cancelled" if self._cancelled else "failed" if self._failed is not None else "done"
        answered = len(self._order)
        return (
            f"<WorkerGroupFuncResult {self._method}() "
            f"{state if self._finished else f'{answered} of {len(self._peers)} ranks'}>"
        )


def refuse_own(runtime: Runtime, method: str, peers: Sequence[Peer]) -> None:
    """Refuse to block the thread that serves this worker's calls until one of them is answered.

    Args:
        runtime: of this process.
        method: what was called, on *peers*, which have not answered.

    Raises:
        UsageError: this process is one of the peers, and this is that thread.
    """
    if runtime.serving_thread != threading.get_ident():
        return
    for peer in peers:
        if peer.worker_id == runtime.worker_id:
            raise UsageError(
                f"{peer.name} waits for its own {method}(), which would never end: it runs one call at a time. "
                f"Call the method directly, await it in an async def, or use execute_on() to leave this rank out"
            )


def _reduction(name: str) -> Callable[[list[float]], float]:
    try:
        return REDUCTIONS[name]
    except KeyError:
        raise ValueError(f"reduction_type is {name!r}; it must be one of {', '.join(REDUCTIONS)}") from None


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
