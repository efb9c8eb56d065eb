"""WorkerGroupFuncResult: the results of a call on a group, one value per rank, to be awaited or waited for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, Union, overload

import msgspec

from rlinf_actors import forks
from rlinf_actors.errors import CallTimeoutError, GroupClosedError, SerializationError, UsageError
from rlinf_actors.group.durations import Durations
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.model.readable import ranges
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.future import Future, Promise, call_all
from rlinf_actors.runtime.late_report import ANSWER_S, LateReport, late_text
from rlinf_actors.runtime.outcome_frames import forget_error
from rlinf_actors.runtime.peer import Peer, new_call
from rlinf_actors.runtime.shared_arguments import SharedArguments
from rlinf_actors.shown import html_table
from rlinf_actors.tracing import flows, recorder
from rlinf_actors.wire import failure, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.stack_values import MAX_WAITS

if TYPE_CHECKING:
    from rlinf_actors.runtime.remote_group import RemoteGroup
    from rlinf_actors.runtime.runtime import Runtime

T = TypeVar("T")
_new_lock = threading.Lock


class _Value(msgspec.Struct, frozen=True):
    """An unpickled result, and the seconds that the method took."""

    value: Any
    seconds: float


# gc=False here: a call to 10,000 ranks keeps one of each for each rank. If the garbage collector counted them, it would
# walk all objects of the process every few calls, which cost a quarter of a call. No cycle lasts: a Peer drops a
# RankCall with the answer, or when it fails; what is received refers to nothing of the call.


class _Received(msgspec.Struct, frozen=True, gc=False):
    """An answer that is not unpickled."""

    frame: frames.AnyFrame
    parts: AuthenticatedParts


_Answer = Union[_Received, _Value, Exception]


class RankCall(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The part of a group call that one rank has to answer. The Peer of the rank keeps it until the answer comes."""

    result: WorkerGroupFuncResult[Any]
    index: int
    anywhere: ClassVar[bool] = True

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """Pass the rank's answer on to the group call. Return True: no further answer will come. Any thread."""
        self.result._arrived(self.index, _Received(frame, parts), type(frame) is not frames.Ok)
        return True

    def fail(self, error: Exception) -> None:
        """Pass *error* on to the group call instead of an answer, because the worker cannot answer. Any thread."""
        self.result._source_gone(self.index)
        self.result._arrived(self.index, error, True)

    @property
    def wanted(self) -> bool:
        """False if all who waited for the result have stopped."""
        return bool(self.result._callbacks) or not self.result._left

    def parts_wanted(self) -> None:
        """Send the rank its large arguments, which it did not get from another rank of its node. Loop thread."""
        sharing = self.result._sharing
        if sharing is not None:
            sharing.send(self.result._peers[self.index])


class WorkerGroupFuncResult(Durations, Future["list[T]"], Generic[T]):
    """The results of one call on a group or view; ``await`` or `wait` returns one value per rank, in rank order.

    The call ends when all ranks have answered, or when the first rank fails: the others may never answer, because they
    may wait in a collective for the failed rank. The thread that waits for the results unpickles them. ``await`` and
    `wait` may be used any number of times, on any thread and in any event loop. Cancelling a task that awaits the
    results does not cancel the call; `cancel` does.
    """

    # defaults of the class: a call sets few of them, and there may be 100,000 calls a second
    _call = 0
    _failed: int | None = None  # index of the rank whose failure ended the call
    _progress: Promise[None] | None = None  # ends when the next rank answers
    _timer: asyncio.TimerHandle | None = None
    _timeout: float | None = None
    _unseen = False  # the call failed, and no caller was given the error
    _beside = False  # the method has threads of its own (Worker.concurrent)
    _span = 0  # in the trace, 0 if this process is not traced
    _launch: RemoteGroup | None = None  # of a group that may be on robots, and not up
    _left = False  # a caller has stopped waiting
    _once = True  # the arguments are sent to each worker once, so the last one may be lent them without a copy
    _sharing: SharedArguments | None = None  # until all ranks have answered
    loop: asyncio.AbstractEventLoop | None = None
    shared = False

    def __init__(self, runtime: Runtime, method: str, peers: Sequence[Peer], timeout: float | None = None) -> None:
        self._what = method  # this and the next two as Future does it: 100,000 calls a second
        self._lock = _new_lock()
        self._made_in = forks.generation
        self._runtime = runtime
        self._method = method
        self._peers = peers
        if len(peers) > 1:  # their answers come one by one: the I/O thread takes them in while the others run
            self._by_loop = True
        if timeout is not None:
            self._timeout = timeout
        self._answers: dict[int, _Answer] = {}  # by index of the rank, in the order in which the ranks have answered
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
        """Send the call to the workers.

        Args:
            *parts: the pickled arguments: one value for all ranks, or one for each rank.
        """
        call = self._call = new_call()
        if (active := recorder.active) is not None and self._peers:
            self._begin_span(active, self._peers[0])
        frame = frames.Call(call, self._method, self._timeout or 0.0)
        single = len(self._peers) == 1
        if single and (self._once or len(parts[0]) < 2):
            self._peers[0].post_call(RankCall(self, 0), frame, parts[0])
            if self._timeout is not None:
                self._runtime.io.call(self._start_timer, self._timeout)
            return
        header = frames.encode(frame)
        sharing = None
        own = single or len(parts) > 1
        if not own and len(parts[0]) > 1 and self._once:
            sharing = self._sharing = SharedArguments.of(call, parts[0], self._peers)
        for index, peer in enumerate(self._peers):
            # links to other machines share a socket: what goes to several ranks leaves it in one flush
            idle = not peer.pending and (single or peer.sibling is None)
            peer.open(RankCall(self, index), call)
            if sharing is not None and peer in sharing:
                sharing.share(peer)
                peer.send(frames.SharedCall(call, self._method, self._timeout or 0.0), sharing.small)
                continue
            peer.post(header, parts[index] if own else parts[0], now=idle, alone=self._once and own)
        if self._timeout is not None:
            self._runtime.io.call(self._start_timer, self._timeout)

    def _begin_span(self, active: recorder.Recorder, peer: Peer) -> None:
        """Record the call as a span, which `_wake` ends, with an arrow to each worker. *peer* is one of the workers."""
        self._span = active.begin(f"{peer.name.rpartition(':')[0]}.{self._method}()", flows.CALL)
        active.flow_out(self._span, flows.of_request(peer.own_identity, self._call))

    def _start_timer(self, seconds: float) -> None:
        # after the first failure too: other ranks may still run the call
        if len(self._answers) < len(self._peers) and self._error is None:
            self._timer = self._runtime.io.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Cancel the call, because its deadline has passed, and ask the ranks that have not answered what they run."""
        report = LateReport(self._missing(), self._runtime.peer)  # first: the ranks answer it before they cancel
        for peer in self._peers:
            peer.forget(self._call)
        self._timer = self._runtime.io.loop.call_later(ANSWER_S, self._expired, report)
        report._on_done(lambda: self._runtime.io.call(self._expired, report))

    def _expired(self, report: LateReport) -> None:
        """End the call with a CallTimeoutError that says what the late ranks run.

        Called when the late ranks have said what they run, or ANSWER_S after the deadline.
        """
        text = report.describe()
        missing = ", ".join(peer.name for peer in self._missing())
        self._abandon(
            CallTimeoutError(f"{self._method}() had {self._timeout:g} s and did not return from {missing}: {text}")
        )

    def _missing(self) -> list[Peer]:
        return [peer for index, peer in enumerate(self._peers) if index not in self._answers]

    def _waited_for(self) -> tuple[str, Sequence[str]]:
        late = self._missing()
        group = self._peers[0].name.rpartition(":")[0] if self._peers else "no group"
        what = f"{self._method}() of {group}:{ranges(peer.rank for peer in late)}"
        return what, [peer.name for peer in late[:MAX_WAITS]]

    def _ranks(self) -> tuple[Sequence[Peer], Sequence[Peer]]:
        done = set(self._answers.copy())
        late = [peer for index, peer in enumerate(self._peers) if index not in done]
        return late, [self._peers[index] for index in done]

    def _timeout_error(self, timeout: float) -> CallTimeoutError:
        group, late = self._peers[0].name.rpartition(":")[0], late_text(self._missing(), timeout, self._runtime.peer)
        return CallTimeoutError(
            f"{self._method}() of group {group!r} was not done within {timeout:g} s; it goes on: {late}"
        )

    def _abandon(self, error: BaseException) -> bool:
        """Give up the call: cancel it on all ranks, and end it with *error* if it has not ended.

        Do nothing if all ranks have answered, or if the call was given up before. Return True if *error* ended the
        call; False if it had already ended, such as by the failure of one rank.
        """
        with self._lock:
            if self._error is not None or len(self._answers) == len(self._peers):
                return False
            ended = not self._finished
            if ended and isinstance(error, CallTimeoutError):
                self._report_failure(bool(self._callbacks))  # before a caller can take the error and mark it as seen
            self._error, self._finished = error, True
            callbacks, self._callbacks = self._callbacks, ()
            progress, self._progress = self._progress, None
        for peer in self._peers:
            peer.forget(self._call)
        self._wake(callbacks, progress)
        return ended

    def _wake(self, callbacks: tuple[Callable[[], object], ...], progress: Promise[None] | None) -> None:
        call_all(callbacks)
        if self._span and self._finished and (active := recorder.active) is not None:
            active.end(self._span)
            self._span = 0
        if progress is not None:
            progress.resolve(None)
        if self._timer is not None and (self._error is not None or len(self._answers) == len(self._peers)):
            self._runtime.io.call(self._timer.cancel)

    def _forget(self, callback: Callable[[], object]) -> None:
        super()._forget(callback)
        self._left = True
        if self._launch is not None and self._launch.ends_unheld():
            forget_error()

    # --- answers (any thread) ---

    def _arrived(self, index: int, answer: _Answer, failed: bool) -> None:
        callbacks: tuple[Callable[[], object], ...] = ()
        with self._lock:
            answers = self._answers
            if index in answers or self._error is not None:
                return
            answers[index] = answer
            last = len(answers) == len(self._peers)
            if last and self._sharing is not None:
                self._sharing = None
            progress = self._progress
            if progress is not None:
                self._progress = None
            if (failed or last) and not self._finished:
                callbacks = self._callbacks
                if failed:
                    self._failed = index
                    if not isinstance(answer, GroupClosedError):  # the caller itself shut the group down
                        self._report_failure(bool(callbacks))
                self._finished = True
                if callbacks:
                    self._callbacks = ()
        if progress is not None or self._span or self._timer is not None:
            self._wake(callbacks, progress)
        elif callbacks:
            call_all(callbacks)

    def _source_gone(self, index: int) -> None:
        sharing = self._sharing
        if sharing is not None:
            sharing.gone(self._peers[index])

    def _report_failure(self, awaited: bool) -> None:
        self._unseen = True
        self._runtime.lost.failed(self, awaited=awaited)

    def _mark_seen(self) -> None:
        if self._unseen:
            self._unseen = False
            self._runtime.lost.seen(self)

    def _outcome(self) -> list[T]:
        if self._failed is not None or self._error is not None:
            self._mark_seen()
            # one error may be raised many times (of a dead worker: by every call): its traceback must not grow
            raise self._raised().with_traceback(None)
        values: list[Any] = []
        for index in range(len(self._peers)):
            answer = self._answers[index]  # without parts it is None, and nothing is decoded
            values.append(None if type(answer) is _Received and not answer.parts else self._value_of(index))
        return values

    def _raised(self) -> BaseException:
        if self._failed is not None:
            return self._error_of(self._failed)
        assert self._error is not None
        return self._error

    def _value_of(self, index: int) -> T:
        value: T
        with self._lock:
            answer = self._answers[index]
            if type(answer) is _Value:
                value = answer.value
                return value
            assert isinstance(answer, _Received)
            try:
                value = payload.decode(answer.parts)
            except Exception as error:
                peer = self._peers[index]
                raise failure.unreadable("the result", self._method, peer.name, peer.node, error) from error
            assert isinstance(answer.frame, frames.Ok)
            self._answers[index] = _Value(value, answer.frame.seconds)
            return value

    def _error_of(self, index: int) -> Exception:
        answer = self._answers[index]
        if isinstance(answer, Exception):
            return answer
        assert isinstance(answer, _Received)
        assert isinstance(answer.frame, frames.Raised)
        error = self._answers[index] = self._peers[index].exception(answer.frame, answer.parts)
        return error

    # --- the caller's side ---

    @property
    def attempts(self) -> list[int]:
        """How many times the call was sent to each rank, in rank order. Always 1 without `with_retries`."""
        return [1] * len(self._peers)

    def cancel(self) -> bool:
        """Cancel the call on all ranks that have not answered. Any thread; never blocks.

        A rank drops the call if it waits in the queue, and cancels it if it runs as a coroutine. A method that runs on
        a thread runs to its end, and its result is discarded. If one rank has failed, which ended the call, the other
        ranks are still told to cancel it.

        Returns:
            True if this ended the call; False if the call had already ended.
        """
        return self._abandon(concurrent.futures.CancelledError(f"the call of {self._method}() was cancelled"))

    def cancelled(self) -> bool:
        """Return True if `cancel` ended the call."""
        return isinstance(self._error, concurrent.futures.CancelledError)

    def exception(self) -> BaseException | None:
        """Return the error that `wait` raises, None if the call has not ended or has succeeded.

        The library then does not report the error as one that no code has seen.
        """
        if not self._finished or (self._failed is None and self._error is None):
            return None
        self._mark_seen()
        return self._raised()

    @overload
    def as_completed(self, return_exceptions: Literal[False] = False) -> AsyncGenerator[tuple[int, T], None]: ...
    @overload
    def as_completed(self, return_exceptions: bool) -> AsyncGenerator[tuple[int, T | Exception], None]: ...
    async def as_completed(self, return_exceptions: bool = False) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield ``(rank, value)`` for each rank, in the order in which the ranks answer.

        Args:
            return_exceptions: True to yield ``(rank, error)`` for a rank that failed, and go on; False to raise the
                error.
        """
        order: list[int] = []
        for n in range(len(self._peers)):
            while len(self._answers) <= n:
                with self._lock:
                    progress = self._progress
                    if progress is None:
                        progress = self._progress = Promise(self._method)
                    arrived = len(self._answers) > n
                if arrived:
                    break
                if self._error is not None:
                    self._mark_seen()
                    raise self._error.with_traceback(None)
                await progress
            if len(order) <= n:
                order = list(self._answers)
            index = order[n]
            rank, answer = self._peers[index].rank, self._answers[index]
            if isinstance(answer, _Value) or (isinstance(answer, _Received) and isinstance(answer.frame, frames.Ok)):
                yield rank, self._value_of(index)
                continue
            self._mark_seen()
            if not return_exceptions:
                raise self._error_of(index)
            yield rank, self._error_of(index)

    def _durations(self) -> list[float]:
        answers = (answer for _, answer in sorted(self._answers.items()))
        timed = (answer.frame if isinstance(answer, _Received) else answer for answer in answers)
        return [answer.seconds for answer in timed if isinstance(answer, (_Value, frames.Ok))]

    def _succeeded(self) -> bool:
        return self._failed is None and len(self._answers) == len(self._peers)

    def _beside_it(self, method: str) -> WorkerGroupFuncResult[Any]:
        """Return a call of *method* on the same ranks that has not begun, for `Durations`."""
        return WorkerGroupFuncResult(self._runtime, method, self._peers)

    def _check_blocking(self) -> None:
        if not self._beside and self._runtime.serving_thread == threading.get_ident():
            refuse_own(self._runtime, self._method, self._missing())

    # --- what LostErrors reads of a call that failed (runtime.lost_errors.FailedOperation) ---

    @property
    def cause(self) -> Exception | None:
        """The error object, if other calls may have failed with the same object; else None."""
        answer = None if self._failed is None else self._answers[self._failed]
        return answer if isinstance(answer, Exception) else None

    def raised(self) -> BaseException:
        """Return the error that `wait` raises. LostErrors, which reports errors that no code has seen, calls this."""
        return self._raised()

    def describe(self) -> str:
        """Return the error of the failed call as text for the log. Does not unpickle, so no user code runs."""
        if self._failed is None:
            return str(self._raised())
        answer, peer = self._answers[self._failed], self._peers[self._failed]
        frame = answer.frame if isinstance(answer, _Received) else answer
        assert isinstance(frame, (frames.Raised, Exception))
        return failure.describe(frame, self._method, worker=peer.name, node=peer.node)

    def __del__(self) -> None:
        if self._unseen:
            self._runtime.lost.collected(self)

    def __repr__(self) -> str:
        if not self._finished:
            state = f"{len(self._answers)} of {counted(len(self._peers), 'rank')}"
        elif self.cancelled():
            state = "cancelled"
        else:
            state = "done" if self._failed is None and self._error is None else "failed"
        return f"<WorkerGroupFuncResult {self._method}() {state}>"

    def _repr_html_(self) -> str:
        rows = [(peer.name, peer.node, self._state_of(index)) for index, peer in enumerate(self._peers)]
        return html_table(repr(self)[1:-1], ("worker", "node", "answer"), rows)

    def _state_of(self, index: int) -> str:
        answer = self._answers.get(index)
        if answer is None:
            return "none" if self._error is not None else "waits"
        returned = type(answer.frame) is frames.Ok if isinstance(answer, _Received) else isinstance(answer, _Value)
        return "returned" if returned else "failed"


def refuse_own(runtime: Runtime, method: str, peers: Sequence[Peer]) -> None:
    """Raise UsageError if this thread is about to wait for a call that only this thread can run.

    That is so on the main thread of a worker that calls a method of itself.

    Args:
        runtime: runtime of this process.
        method: name of the called method, for the message.
        peers: Peers of the workers that are called.
    """
    if runtime.serving_thread != threading.get_ident():
        return
    for peer in peers:
        if peer.worker_id == runtime.worker_id:
            raise UsageError(
                f"{peer.name} waits for its own {method}(), which would never end: it runs one call at a time. "
                f"Call the method directly, await it in an async def, or use execute_on() to leave this rank out"
            )
