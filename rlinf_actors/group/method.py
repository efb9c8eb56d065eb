"""RemoteMethod: one method of a worker class on some ranks of a group."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, cast

from rlinf_actors.errors import UsageError
from rlinf_actors.group.class_facts import Method
from rlinf_actors.group.mapping import TRIES, MapResult, Pool
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.group.retries import RetriedResult
from rlinf_actors.group.stream import StreamResult
from rlinf_actors.wire import payload

if TYPE_CHECKING:
    from rlinf_actors.group.control import GroupControl
    from rlinf_actors.model.buffers import Buffer
    from rlinf_actors.runtime.peer import Peer
    from rlinf_actors.runtime.runtime import Runtime

P = ParamSpec("P")
Q = ParamSpec("Q")
X = TypeVar("X")
V = TypeVar("V")
Result = TypeVar("Result", covariant=True)


class CallOptions(NamedTuple):
    """How the calls of a view are made.

    Attributes:
        timeout: their deadline, in seconds; None for no deadline.
        retries: how often a call may be sent again to the worker that takes the place of one that died.
    """

    timeout: float | None = None
    retries: int = 0


ONCE = CallOptions()


class RemoteMethod(Generic[P, Result]):
    """One method of the worker class on some ranks; calling it sends the call.

    ``RemoteMethod[P, Result]`` is called with arguments *P* and returns *Result*: a ``WorkerGroupFuncResult``, or of a
    method that streams a ``StreamResult``.
    """

    __slots__ = ("_control", "_method", "_name", "_options", "_ranks")

    def __init__(
        self,
        control: GroupControl,
        name: str,
        method: Method,
        ranks: Sequence[int] | None,
        options: CallOptions,
    ) -> None:
        self._control = control
        self._name = name
        self._method = method
        self._ranks = ranks
        self._options = options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        """Send the call to every rank; returns at once.

        Returns:
            A WorkerGroupFuncResult, or for a generator method a StreamResult.

        Raises:
            SerializationError: an argument cannot be pickled; names its path.
            UsageError: the view's deadline or retries do not go with this method.
        """
        runtime = self._checked()
        result: Result = self._send(payload.encode_call(args, kwargs, copy=runtime.copy))
        return result

    def scatter(
        self: Callable[Concatenate[X, Q], Result], values: Iterable[X], *args: Q.args, **kwargs: Q.kwargs
    ) -> Result:
        """Call each rank with a value of its own: ``group.step.scatter(batches, lr=0.1)``; returns at once.

        Args:
            values: for each rank of the group or view, in rank order, its first argument.
            *args, **kwargs: what follows it, the same for all ranks.

        Returns:
            As a call: results in rank order.

        Raises:
            ValueError: there are more values than ranks, or fewer.
            SerializationError: an argument cannot be pickled; names its path.
            UsageError: the view's deadline or retries do not go with this method.
        """
        method = cast("RemoteMethod[..., Any]", self)  # typed as what it is called with, so that values are checked
        given, ranks = list(values), len(method._peers())
        if len(given) != ranks:
            raise ValueError(
                f"{method._name}.scatter() was given {len(given)} values for {ranks} ranks of group "
                f"{method._control.name!r}: it takes one for each"
            )
        copy = method._checked().copy
        each = [payload.encode_call((value, *args), kwargs, copy=copy) for value in given]
        result: Result = method._send(*each)
        return result

    def map(  # type: ignore[misc]
        self: Callable[[X], WorkerGroupFuncResult[V]],
        items: Iterable[X] | AsyncIterable[X],
        max_in_flight: int = 2,
        ordered: bool = False,
    ) -> MapResult[V]:
        """Call the method once for each item, on whichever rank is free: ``for value in group.step.map(items): ...``.

        Nothing is drawn or sent before the result is iterated, by ``for`` or ``async for``. Items are drawn as ranks
        get free and results are taken, so they may be without end; see MapResult.

        An item of a worker that died is sent to another one if the method is marked ``@Worker.idempotent``: three
        times in all at most, or as often as a view of ``with_retries`` says. Workers that were started again take
        items again.

        Args:
            items: what the method is called with, as its only argument. Plain or async iterable; an async one needs
                ``async for``.
            max_in_flight: calls that each rank has at a time. With 2 the next one is there when one ends.
            ordered: yield results in the order of the items, not as they come.

        Raises:
            ValueError: *max_in_flight* is no whole number of 1 or more.
            UsageError: the method streams; or, as the iteration begins, see MapResult.
        """
        method = cast("RemoteMethod[..., Any]", self)
        return method._map(items, max_in_flight, ordered)

    def _map(self, items: Any, max_in_flight: int, ordered: bool) -> MapResult[Any]:
        if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight!r}; it must be a whole number, 1 or more")
        if self._method.streams:
            raise UsageError(f"{self._name}() streams, and map() takes one result for each item: call it on the ranks")
        runtime, (timeout, retries) = self._checked(), self._options
        ranks = [peer.rank for peer in self._peers()]
        tries = (1 + retries if retries else TRIES) if self._method.idempotent else 1
        group = self._control.group
        pool = Pool(runtime, group, self._name, self._method, ranks, max_in_flight, timeout, ordered, tries)
        return MapResult(pool, items, lambda item: payload.encode_call((item,), {}, copy=runtime.copy))

    def _send(self, *parts: Sequence[Buffer]) -> Any:
        """Send the call: the same arguments to every rank, or to each its own."""
        runtime, (timeout, retries) = self._control.runtime, self._options
        if self._method.streams:
            return StreamResult(runtime, self._name, self._peers(), parts, beside=self._method.concurrent > 0)
        result: WorkerGroupFuncResult[Any]
        if retries:
            result = RetriedResult(runtime, self._name, self._peers(), timeout, self._control.group, retries)
        else:
            result = WorkerGroupFuncResult(runtime, self._name, self._peers(), timeout)
        if self._method.concurrent:
            result._beside = True
        result._start(*parts)
        return result

    def _checked(self) -> Runtime:
        """Return the runtime, if the method can be called so."""
        runtime, name, (timeout, retries) = self._control.runtime, self._name, self._options
        runtime.check_usable()
        if self._method.streams and timeout is not None:
            raise UsageError(
                f"{name}() streams, and a stream has no deadline: leave the loop when it has run long enough"
            )
        if self._method.streams and retries:
            raise UsageError(
                f"{name}() streams, and a stream is not sent again, since its first items were taken: call it without "
                "with_retries(), and begin again where it failed"
            )
        if retries and not self._method.idempotent:
            raise UsageError(
                f"{self._control.cls_name}.{name}() is not marked idempotent, and with_retries() may run it twice: "
                f"write @Worker.idempotent above its def if that does no harm, or call it without with_retries()"
            )
        return runtime

    def _peers(self) -> Sequence[Peer]:
        """Return the peers as they are now: a rank that was started again has another."""
        peers = self._control.group.peers
        return peers if self._ranks is None else [peers[rank] for rank in self._ranks]

    def __repr__(self) -> str:
        return f"<method {self._name}() of group {self._control.name!r}, ranks {[peer.rank for peer in self._peers()]}>"
