"""Method calls as attributes: what turns ``group.step`` into a call on some ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlinf_actors.errors import UsageError
from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.group.stream import StreamResult
from rlinf_actors.wire import payload

if TYPE_CHECKING:
    from rlinf_actors.runtime.peer import Peer


class RemoteMethod:
    """One method of the worker class on some ranks; calling it sends the call."""

    __slots__ = ("_control", "_name", "_ranks", "_streams", "_timeout")

    def __init__(
        self,
        control: GroupControl,
        name: str,
        streams: bool,
        ranks: Sequence[int] | None,
        timeout: float | None,
    ) -> None:
        self._control = control
        self._name = name
        self._streams = streams
        self._ranks = ranks
        self._timeout = timeout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Send the call to every rank; returns at once.

        Returns:
            A WorkerGroupFuncResult, or for an async generator method a StreamResult.

        Raises:
            SerializationError: an argument cannot be pickled; names its path.
        """
        self._control.runtime.check_usable()
        parts = payload.encode_call(args, kwargs, copy=self._control.runtime.copy)
        if self._streams:
            if self._timeout is not None:
                raise UsageError(
                    f"{self._name}() streams, and a stream has no deadline: leave the loop when it has run long enough"
                )
            return StreamResult(self._name, self._peers(), parts, self._control.runtime.lost)
        result: WorkerGroupFuncResult[Any] = WorkerGroupFuncResult(
            self._control.runtime, self._name, self._peers(), self._timeout
        )
        result._start(parts)
        return result

    def _peers(self) -> Sequence[Peer]:
        """Those of now: a rank that was started again has another."""
        peers = self._control.group.peers
        return peers if self._ranks is None else [peers[rank] for rank in self._ranks]

    def __repr__(self) -> str:
        return f"<method {self._name}() of group {self._control.name!r}, ranks {[peer.rank for peer in self._peers()]}>"


if TYPE_CHECKING:
    yielding = property
else:

    class yielding:
        """A property that an attribute of the instance hides: a worker's own method of that name."""

        def __init__(self, read: Callable[[Any], Any]) -> None:
            self._read = read
            self.__doc__ = read.__doc__

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            return self if instance is None else self._read(instance)


class Calls:
    """Turns attribute access into remote methods."""

    _control: GroupControl

    def _ranks_called(self) -> Sequence[int] | None:
        """None for all."""
        return None

    def _timeout_of_calls(self) -> float | None:
        return None

    def _used(self) -> None:
        """Somebody asked for a method."""

    def __getattr__(self, name: str) -> Any:
        control = self.__dict__.get("_control")
        if control is None:
            raise AttributeError(name)
        known = control.methods.get(name)
        self._used()
        if known is None:
            return _missing(control, name)
        method = RemoteMethod(control, name, known.streams, self._ranks_called(), self._timeout_of_calls())
        self.__dict__[name] = method
        return method

    def __dir__(self) -> list[str]:
        self._used()
        return sorted({*object.__dir__(self), *self._control.methods})


def _missing(control: GroupControl, name: str) -> Callable[..., Any]:
    """What an attribute that is no public method gives: ValueError on the call of a private one."""
    if name.startswith("_") and not name.startswith("__") and callable(getattr(control.cls, name, None)):

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise ValueError(
                f"{control.cls_name}.{name}() is private (its name begins with _) and cannot be called on a group"
            )

        return refuse
    raise AttributeError(
        f"{control.cls_name} has no public method {name!r}; it has {', '.join(sorted(control.own_methods)) or 'none'}"
    )
