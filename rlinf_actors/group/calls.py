"""Calls: what turns ``group.step(x)`` and ``group.call(MyWorker.step, x)`` into a call on some ranks.

A type checker knows nothing of ``group.step``, since the group's methods are the worker class's: its results are Any.
``group.method(MyWorker.step)`` is the same with types: its arguments are checked, and its results known.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.method import ONCE, CallOptions, RemoteMethod
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.group.stream import StreamResult

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class _Untyped:
    """No method's result: of all methods only those whose result is Any are taken for ones that return it."""


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


class Calls(Generic[T]):
    """Turns attribute access into remote methods of workers of class *T*."""

    _control: GroupControl

    def __init__(self, control: GroupControl) -> None:
        self._control = control
        for name in control.yielded:
            self._remote(name)  # kept on the instance, where it is found before the class's own

    # Overloads: of methods, and of static and class methods (which have no *self* to leave out), those that stream,
    # coroutine functions, and plain ones. Those for _Untyped come first: a result of type Any fits all of them.
    # `call` has those for methods alone: a type checker's word about a wrong argument is of the last one it tried.
    @overload
    def method(self, function: Callable[Concatenate[T, P], _Untyped]) -> RemoteMethod[P, Any]: ...
    @overload
    def method(  # type: ignore[overload-overlap]  # of two that fit the first counts, for both type checkers
        self, function: Callable[Concatenate[T, P], AsyncIterator[R] | Iterator[R]]
    ) -> RemoteMethod[P, StreamResult[R]]: ...
    @overload
    def method(
        self, function: Callable[Concatenate[T, P], Coroutine[Any, Any, R]]
    ) -> RemoteMethod[P, WorkerGroupFuncResult[R]]: ...
    @overload
    def method(self, function: Callable[Concatenate[T, P], R]) -> RemoteMethod[P, WorkerGroupFuncResult[R]]: ...
    @overload
    def method(self, function: Callable[P, _Untyped]) -> RemoteMethod[P, Any]: ...
    @overload
    def method(  # type: ignore[overload-overlap]
        self, function: Callable[P, AsyncIterator[R] | Iterator[R]]
    ) -> RemoteMethod[P, StreamResult[R]]: ...
    @overload
    def method(self, function: Callable[P, Coroutine[Any, Any, R]]) -> RemoteMethod[P, WorkerGroupFuncResult[R]]: ...
    @overload
    def method(self, function: Callable[P, R]) -> RemoteMethod[P, WorkerGroupFuncResult[R]]: ...
    def method(self, function: Callable[..., Any]) -> RemoteMethod[..., Any]:
        """Return a method of the workers with its types: ``group.method(MyWorker.step)`` is ``group.step``.

        Args:
            function: a public method of the worker class, as an attribute of the class or of a base. An override in
                the worker class is what runs.

        Raises:
            UsageError: the worker class has no such method.
        """
        self._used()
        return self._remote(self._control.name_of(function))

    @overload
    def call(self, function: Callable[Concatenate[T, P], _Untyped], *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def call(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[T, P], AsyncIterator[R] | Iterator[R]], *args: P.args, **kwargs: P.kwargs
    ) -> StreamResult[R]: ...
    @overload
    def call(
        self, function: Callable[Concatenate[T, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerGroupFuncResult[R]: ...
    @overload
    def call(
        self, function: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerGroupFuncResult[R]: ...
    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method with its types: ``group.call(MyWorker.step, x)`` is ``group.step(x)``.

        See `method`; type checkers want that for static and class methods, ``group.method(MyWorker.of_class)(x)``.
        """
        return Calls.method(self, function)(*args, **kwargs)  # self.method may be the worker's own

    def _ranks_called(self) -> Sequence[int] | None:
        """None for all."""
        return None

    def _options_of_calls(self) -> CallOptions:
        return ONCE

    def _used(self) -> None:
        """Somebody asked for a method."""

    def _remote(self, name: str) -> RemoteMethod[..., Any]:
        """Return a public method by its name; made once for each view."""
        known = self.__dict__.get(name)
        if known is not None:
            method: RemoteMethod[..., Any] = known
            return method
        control = self._control
        method = RemoteMethod(control, name, control.methods[name], self._ranks_called(), self._options_of_calls())
        self.__dict__[name] = method
        return method

    def __getattr__(self, name: str) -> RemoteMethod[..., Any]:
        control = self.__dict__.get("_control")
        if control is None:
            raise AttributeError(name)
        self._used()
        return self._remote(name) if name in control.methods else _missing(control, name)

    def __dir__(self) -> list[str]:
        self._used()
        return sorted({*object.__dir__(self), *self._control.methods})


def _missing(control: GroupControl, name: str) -> Any:
    """What an attribute that is no public method gives: ValueError on the call of a private one."""
    if name in control.facts.private:

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise ValueError(
                f"{control.cls_name}.{name}() is private (its name begins with _) and cannot be called on a group"
            )

        return refuse
    raise AttributeError(
        f"{control.cls_name} has no public method {name!r}; it has {', '.join(sorted(control.facts.own)) or 'none'}"
    )
