"""RemoteMethod: one method of a worker class on some ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

from rlinf_actors.errors import UsageError
from rlinf_actors.group.names import Method
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.group.retries import RetriedResult
from rlinf_actors.group.stream import StreamResult
from rlinf_actors.wire import payload

if TYPE_CHECKING:
    from rlinf_actors.group.control import GroupControl
    from rlinf_actors.runtime.peer import Peer

P = ParamSpec("P")
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
        runtime = self._control.runtime
        runtime.check_usable()
        self._check()
        parts = payload.encode_call(args, kwargs, copy=runtime.copy)
        result: Any
        if self._method.streams:
            result = StreamResult(runtime, self._name, self._peers(), parts, beside=self._method.concurrent > 0)
        else:
            result = self._result()
            result._start(parts)
        returned: Result = result
        return returned

    def _result(self) -> WorkerGroupFuncResult[Any]:
        """Return the result of a call that is about to be sent."""
        runtime, (timeout, retries) = self._control.runtime, self._options
        result: WorkerGroupFuncResult[Any]
        if retries:
            result = RetriedResult(runtime, self._name, self._peers(), timeout, self._control.group, retries)
        else:
            result = WorkerGroupFuncResult(runtime, self._name, self._peers(), timeout)
        if self._method.concurrent:
            result._beside = True
        return result

    def _check(self) -> None:
        name, (timeout, retries) = self._name, self._options
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

    def _peers(self) -> Sequence[Peer]:
        """Return the peers as they are now: a rank that was started again has another."""
        peers = self._control.group.peers
        return peers if self._ranks is None else [peers[rank] for rank in self._ranks]

    def __repr__(self) -> str:
        return f"<method {self._name}() of group {self._control.name!r}, ranks {[peer.rank for peer in self._peers()]}>"
