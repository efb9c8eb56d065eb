"""RemoteMethod: one method of a worker class on some ranks of a group."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, cast

from rlinf_actors import forks
from rlinf_actors.errors import PlacementError, UsageError
from rlinf_actors.group.class_facts import Method
from rlinf_actors.group.mapping import TRIES, MapResult, Pool
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.group.retries import RetriedResult
from rlinf_actors.group.stream import StreamResult
from rlinf_actors.plurals import counted
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
    """What `with_timeout` and `with_retries` set for the calls of a view.

    Attributes:
        timeout: seconds that each call may take; None for no limit.
        retries: how many times the call of a rank may be sent again, because its worker died.
    """

    timeout: float | None = None
    retries: int = 0


ONCE = CallOptions()


class RemoteMethod(Generic[P, Result]):
    """A method of a group or view: calling this object calls the method on all ranks of the group or view.

    ``RemoteMethod[P, Result]`` takes arguments *P* and returns *Result*: a ``WorkerGroupFuncResult``, or a
    ``StreamResult`` if the method is a generator.
    """

    __slots__ = ("_control", "_method", "_name", "_options", "_ranks", "_special")

    def __init__(
        self, control: GroupControl, name: str, method: Method, ranks: Sequence[int] | None, options: CallOptions
    ) -> None:
        self._control = control
        self._name = name
        self._method = method
        self._ranks = ranks
        self._options = options
        self._special = method.streams or method.concurrent > 0 or options != ONCE

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        """Send the call to every rank and return at once.

        Returns:
            A WorkerGroupFuncResult, or a StreamResult for a generator method.

        Raises:
            SerializationError: an argument cannot be pickled; the message names the path of the argument.
            UsageError: this method does not support the view's deadline or retries.
        """
        runtime = self._control.runtime
        if self._special or runtime.io.made_in != forks.generation:
            self._checked()
        parts = payload.encode_call(args, kwargs, copy=runtime.copy) if args or kwargs else ()
        if self._special:
            special: Result = self._send(parts)
            return special
        group = self._control.group
        call: WorkerGroupFuncResult[Any]
        call = WorkerGroupFuncResult(runtime, self._name, group.peers if self._ranks is None else self._peers())
        if group.unheld is not None:
            call._launch = group
        call._start(parts)
        return call  # type: ignore[return-value]  # typed by the method, without a call of cast()

    def scatter(
        self: Callable[Concatenate[X, Q], Result], values: Iterable[X], *args: Q.args, **kwargs: Q.kwargs
    ) -> Result:
        """Call the method on each rank with its own value, and return at once: ``group.step.scatter(batches, lr=0.1)``.

        Args:
            values: the first argument for each rank, in the order of the ranks of the group or view.
            *args, **kwargs: further arguments, the same for all ranks.

        Returns:
            A WorkerGroupFuncResult, or a StreamResult for a generator method.

        Raises:
            ValueError: the number of values is not the number of ranks.
            SerializationError: an argument cannot be pickled; the message names the path of the argument.
            UsageError: this method does not support the view's deadline or retries.
        """
        method = cast("RemoteMethod[..., Any]", self)  # typed by its call, so that type checkers check the values
        given, ranks = list(values), len(method._peers())
        if len(given) != ranks:
            raise ValueError(
                f"{method._name}.scatter() was given {counted(len(given), 'value')} for "
                f"{counted(ranks, 'rank')} of group {method._control.name!r}: it takes one for each"
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
        """Call the method once for each item, each time on a free rank: ``for value in group.step.map(items): ...``.

        No item is drawn or sent before the result is iterated, by ``for`` or ``async for``. Items are drawn only as
        ranks become free and results are taken, so *items* may be infinite.

        If a worker dies and the method is marked ``@Worker.idempotent``, the worker's items are sent to other workers.
        An item is sent at most three times; `with_retries` sets another limit. Restarted workers get items again.

        Args:
            items: the items, each of which is the only argument of one call. If *items* is an async iterable, the
                result must be iterated by ``async for``.
            max_in_flight: maximum number of calls that each rank has at a time. With 2, one call waits at the worker
                while another runs, so that the worker need not wait for its next item.
            ordered: True to yield results in the order of the items; False to yield them as they arrive.

        Raises:
            ValueError: *max_in_flight* is not a whole number of 1 or more.
            UsageError: the method is a generator.
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
        control = self._control
        pool = Pool(runtime, control.group, self._name, self._method, ranks, max_in_flight, timeout, ordered, tries)
        # the result keeps the handle: before the first call nothing else keeps a launch on robots
        return MapResult(pool, items, lambda item: payload.encode_call((item,), {}, copy=control.runtime.copy))

    def _send(self, *parts: Sequence[Buffer]) -> Any:
        """Send the call to the workers and return its result.

        Args:
            *parts: the pickled arguments: one value for all ranks, or one for each rank.
        """
        runtime, (timeout, retries) = self._control.runtime, self._options
        if self._method.streams:
            beside = self._method.concurrent > 0
            return StreamResult(runtime, self._name, self._peers(), parts, beside=beside, control=self._control)
        result: WorkerGroupFuncResult[Any]
        if retries:
            result = RetriedResult(runtime, self._name, self._peers(), timeout, self._control.group, retries)
        else:
            result = WorkerGroupFuncResult(runtime, self._name, self._peers(), timeout)
        result._launch = self._control.group
        if self._method.concurrent:
            result._beside = True
        result._start(*parts)
        return result

    def _checked(self) -> Runtime:
        """Return the runtime of this process, to send a call.

        Raise UsageError if the calls of this view have a deadline or retries, which the method does not allow.
        """
        runtime, name, (timeout, retries) = self._control.runtime, self._name, self._options
        runtime.check_usable()
        if not (retries or self._method.streams):
            return runtime
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
        """Return the current Peer (connection) of each rank that is called. A restart gives a rank a new Peer."""
        peers: Sequence[Peer] = self._control.group.peers
        if self._ranks is None:
            return peers
        if len(self._ranks) == 1 and self._ranks[0] < len(peers):
            return (peers[self._ranks[0]],)
        if max(self._ranks, default=-1) >= len(peers):
            raise PlacementError(
                f"group {self._control.name!r} has ranks 0-{len(peers) - 1}: rank {max(self._ranks)}, which this call "
                "was to go to, was removed from it"
            )
        return [peers[rank] for rank in self._ranks]

    def __repr__(self) -> str:
        ranks = list(range(len(self._control.group.peers)) if self._ranks is None else self._ranks)
        return f"<method {self._name}() of group {self._control.name!r}, ranks {ranks}>"
