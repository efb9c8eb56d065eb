"""The durations of a call on a group: `consume_duration` and `consume_durations` of WorkerGroupFuncResult.

Both ask the workers for the times that they have recorded (worker.execution_times), which the workers then forget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from rlinf_actors.runtime.future import AsyncWork, Promise
from rlinf_actors.wire import payload

if TYPE_CHECKING:
    from rlinf_actors.group.result import WorkerGroupFuncResult

V = TypeVar("V")

REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
}

Times = dict[str, float]
"""Seconds by tag of one worker."""


class _Call(Protocol):
    """What this module needs of a WorkerGroupFuncResult."""

    _method: str

    def wait(self) -> Any: ...
    def _outcome(self) -> Any: ...
    def _durations(self) -> list[float]: ...
    def _on_done(self, callback: Callable[[], object]) -> None: ...
    def _succeeded(self) -> bool: ...
    def _beside_it(self, method: str) -> WorkerGroupFuncResult[Times]: ...


class Durations:
    """The methods of WorkerGroupFuncResult that return durations; a base class of it."""

    @overload
    def consume_duration(self, reduction_type: str = "max", async_op: Literal[False] = False) -> float: ...

    @overload
    def consume_duration(self, reduction_type: str = "max", *, async_op: Literal[True]) -> AsyncWork[float]: ...

    def consume_duration(self: _Call, reduction_type: str = "max", async_op: bool = False) -> float | AsyncWork[float]:
        """Wait for the results, and return the duration of the call, as one number for all ranks.

        The duration of a rank is the time that the worker has recorded under the method's name as the tag, by
        `Worker.timer` or `Worker.worker_timer`. The worker then forgets this time. Without such a time, or if the
        worker has ended, it is how long the method ran.

        Args:
            reduction_type: "max", "min", "mean" or "sum" of the ranks' seconds.
            async_op: True to return an AsyncWork at once instead of blocking.

        Raises:
            ValueError: *reduction_type* is unknown. Errors of the call are raised too.
        """
        reduce, method = _reduction(reduction_type), self._method

        def reduced(recorded: Sequence[Times]) -> float:
            return reduce([times.get(method, ran) for times, ran in zip(recorded, self._durations(), strict=True)])

        def measured() -> float:
            return reduce(self._durations())

        return _ask(self, "consume_duration", [method], reduced, measured, async_op)

    @overload
    def consume_durations(
        self, reduction_type: str = "max", return_per_rank: Literal[False] = False, async_op: Literal[False] = False
    ) -> Times: ...
    @overload
    def consume_durations(
        self, reduction_type: str = "max", *, return_per_rank: Literal[True], async_op: Literal[False] = False
    ) -> tuple[Times, list[Times]]: ...
    @overload
    def consume_durations(
        self, reduction_type: str, return_per_rank: Literal[True], async_op: Literal[False] = False
    ) -> tuple[Times, list[Times]]: ...
    @overload
    def consume_durations(
        self, reduction_type: str = "max", return_per_rank: Literal[False] = False, *, async_op: Literal[True]
    ) -> AsyncWork[Times]: ...
    @overload
    def consume_durations(
        self, reduction_type: str = "max", *, return_per_rank: Literal[True], async_op: Literal[True]
    ) -> AsyncWork[tuple[Times, list[Times]]]: ...
    def consume_durations(
        self: _Call, reduction_type: str = "max", return_per_rank: bool = False, async_op: bool = False
    ) -> Any:
        """Wait for the results, and return the durations that the workers have recorded under timer tags.

        The workers then forget these durations.

        Args:
            reduction_type: "max", "min", "mean" or "sum".
            return_per_rank: True to return the durations of each rank too.
            async_op: True to return an AsyncWork at once instead of blocking.

        Returns:
            ``{tag: seconds}`` with one number for all ranks that have the tag, made by *reduction_type*. If
            *return_per_rank*, a pair of this and a list with ``{tag: seconds}`` of each rank, in the order of the
            results. The method's name is always a tag: without a recorded time, it has how long the method ran.

        Raises:
            ValueError: *reduction_type* is unknown. Errors of the call are raised too.
        """
        reduce, method = _reduction(reduction_type), self._method

        def reduced(recorded: Sequence[Times]) -> Any:
            per_rank = [{method: ran, **times} for times, ran in zip(recorded, self._durations(), strict=True)]
            by_tag: dict[str, list[float]] = {}
            for times in per_rank:
                for tag, seconds in times.items():
                    by_tag.setdefault(tag, []).append(seconds)
            all_ranks = {tag: reduce(values) for tag, values in by_tag.items()}
            return (all_ranks, per_rank) if return_per_rank else all_ranks

        return _ask(self, "consume_durations", None, reduced, None, async_op)


def _ask(
    call: _Call,
    name: str,
    tags: list[str] | None,
    reduced: Callable[[Sequence[Times]], V],
    otherwise: Callable[[], V] | None,
    async_op: bool,
) -> V | AsyncWork[V]:
    """Wait for *call*, ask its workers for their recorded times, and return what *reduced* makes of these times.

    Args:
        call: the call; if it fails, the workers are not asked.
        name: name of the public method, for errors.
        tags: only these tags; None for all.
        reduced: gets the times of each rank.
        otherwise: makes the result if the workers do not answer; None to raise the error.
        async_op: True to return an AsyncWork of the result.
    """
    timers = call._beside_it("pop_execution_times")
    ended: Promise[None] = Promise(timers._method)

    def ask() -> None:
        try:
            if call._succeeded():
                timers._start(payload.encode_call((tags,), {}) if tags else ())
                timers._on_done(lambda: ended.resolve(None))
            else:
                ended.resolve(None)
        except Exception as error:  # noqa: BLE001 - it reaches the waiter
            ended.reject(error)

    def result(_: None) -> V:
        call._outcome()  # raises the error of a call that failed, whose timers were not asked for
        try:
            recorded = timers._outcome()
        except Exception:
            if otherwise is None:
                raise
            return otherwise()
        return reduced(recorded)

    if not async_op:
        call.wait()  # raises UsageError if this thread itself has to serve the call
    call._on_done(ask)
    work = AsyncWork.made_of(ended, result, f"{name}() of {call._method}()")
    return work if async_op else work.wait()


def _reduction(name: str) -> Callable[[list[float]], float]:
    try:
        return REDUCTIONS[name]
    except KeyError:
        raise ValueError(f"reduction_type is {name!r}; it must be one of {', '.join(REDUCTIONS)}") from None
