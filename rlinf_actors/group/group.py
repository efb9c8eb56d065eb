"""WorkerGroup: the handle of a group, which sends method calls to the workers.

``group.step(x)`` and ``group.call(MyWorker.step, x)`` call a RemoteMethod on all ranks, or on the ranks of a view. For
a type checker the result of ``group.step(x)`` is Any. ``group.method(MyWorker.step)`` is the same method with types:
type checkers check its arguments and know its results.

Handles and views may be used on any thread and be sent to other processes.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from rlinf_actors.errors import UsageError
from rlinf_actors.group.control import GroupControl, attach, control_of, state_of
from rlinf_actors.group.method import ONCE, CallOptions, RemoteMethod
from rlinf_actors.group.resizing import Resizing
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.group.stream import StreamResult
from rlinf_actors.group.view_options import checked_retries, chosen_ranks, ranks_on_node
from rlinf_actors.model.address import WorkerAddress, WorkerInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.outcome_frames import forget_error
from rlinf_actors.wire.protocol import deadline

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _Untyped:
    """A type that no method returns. Only a method with a result of type Any matches an overload for this type."""


if TYPE_CHECKING:
    yielding = property
else:

    class yielding:
        """A property of groups that a method of the worker class with the same name hides."""

        def __init__(self, read: Callable[[Any], Any]) -> None:
            self._read = read
            self.__doc__ = read.__doc__

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            return self if instance is None else self._read(instance)


class Calls(Generic[T]):
    """Base of groups and views: each public method of worker class *T* is an attribute, through which it is called."""

    _control: GroupControl
    _ranks: Sequence[int] | None = None  # None for all
    _options: CallOptions = ONCE

    def __init__(self, control: GroupControl) -> None:
        self._control = control
        for name in control.yielded:
            self._remote(name)  # sets an attribute of the instance, which hides the property of the class

    # Overloads: of methods, and of static and class methods (which have no *self* to leave out), those that stream,
    # coroutine functions, and plain ones. Those for _Untyped come first: a result of type Any fits all of them.
    # `call` has those for methods alone: type checkers report a wrong argument by the last overload they tried.
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
        """Return a method of the group as type checkers know it: ``group.method(MyWorker.step)`` is ``group.step``.

        Type checkers then check the arguments of calls, and know the type of the results.

        Args:
            function: a public method, as an attribute of the worker class or of a base. Workers run the override of
                their class.

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
        """Call a method so that type checkers check the call: ``group.call(MyWorker.step, x)`` is ``group.step(x)``.

        For static and class methods, type checkers need ``group.method(MyWorker.of_class)(x)``; see `method`.
        """
        return Calls.method(self, function)(*args, **kwargs)  # self.method may be the worker's own

    def execute_on(self, *ranks: int | Sequence[int]) -> GroupView[T]:
        """Return a view of some ranks of the group, which can be used any number of times.

        Args:
            *ranks: ranks, or one list of ranks.

        Raises:
            PlacementError: the group has no such rank, or a rank is given more than once.
        """
        self._used()
        return self._view(chosen_ranks(ranks, self._control))

    def on_node(self, node_rank: int) -> GroupView[T]:
        """Return a view of those ranks of this group or view whose workers are on the node with this rank.

        Raises:
            PlacementError: no such rank is on that node.
        """
        self._used()
        return self._view(ranks_on_node(node_rank, self._ranks, self._control))

    def with_timeout(self, seconds: float) -> GroupView[T]:
        """Return a view of the same ranks whose calls have a deadline.

        If a call has not ended *seconds* after it was sent, the caller gets CallTimeoutError. If the call still waits
        in the worker's queue, it never starts. If it runs as a coroutine, it is cancelled. A method that runs on a
        thread runs to its end.

        Raises:
            ValueError: *seconds* is not a number above 0.
        """
        self._used()
        return self._view(timeout=deadline(seconds))

    def with_retries(self, n: int) -> GroupView[T]:
        """Return a view of the same ranks whose calls are sent again, at most *n* times per rank, when a worker dies.

        The methods must be marked ``@Worker.idempotent``, and the group must have a restart policy. If a worker dies,
        or its connection is lost, before the worker has answered a call, the call waits until the worker is restarted,
        and is sent again. The method may then run for the second time. An exception of the method causes no retry. A
        deadline of `with_timeout` covers all tries. After the last try, or if the worker is not restarted, the call
        fails with the last error.

        Raises:
            ValueError: *n* is not a whole number of 1 or more.
            UsageError: the group has no restart policy. Calls of generators, and of methods without the mark, raise it
                too.
        """
        self._used()
        return self._view(retries=checked_retries(n, self._control))

    def _view(self, ranks: Sequence[int] | None = None, **options: Any) -> GroupView[T]:
        """Return a view of *ranks*, or of the same ranks for None. *options* replace fields of its CallOptions."""
        if ranks is None:
            ranks = range(self._control.world_size) if self._ranks is None else self._ranks
        return GroupView(self._control, ranks, warn=True, options=self._options._replace(**options))

    def _used(self) -> None:
        """Record that this view was used, because dropping an unused view warns. Groups do nothing here."""

    def _remote(self, name: str) -> RemoteMethod[..., Any]:
        """Return the RemoteMethod that calls the workers' method *name*, made on first use."""
        known = self.__dict__.get(name)
        if known is not None:
            method: RemoteMethod[..., Any] = known
            return method
        control = self._control
        method = RemoteMethod(control, name, control.methods[name], self._ranks, self._options)
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
    """Handle the use of an attribute that is no public method of the worker class.

    If the class has a private method of this name, return a function that raises ValueError when it is called.
    Otherwise raise AttributeError.
    """
    if name in control.facts.private:

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise ValueError(
                f"{control.cls_name}.{name}() is private (its name begins with _) and cannot be called on a group"
            )

        return refuse
    raise AttributeError(
        f"{control.cls_name} has no public method {name!r}; it has {', '.join(sorted(control.facts.own)) or 'none'}"
    )


C = TypeVar("C")


@dataclass(frozen=True)
class WorkerRankInfo(Generic[T]):
    """One worker of a group, as an entry of `WorkerGroup.worker_info_list`.

    Attributes:
        rank: rank of the worker.
        worker: view of this worker alone: ``worker.step()`` returns a result of one rank.
        info: where the worker runs; complete when the group is ready.
    """

    rank: int
    worker: GroupView[T]
    info: WorkerInfo


class WorkerGroup(Calls[T], Resizing):
    """A running group of workers, as ``MyWorker.create_group(...).launch(cluster)`` returns it.

    ``await group`` waits until every worker is constructed, and returns the group or raises the error of the launch.
    ``async with group`` does the same and shuts the group down at the end. Every public method of the worker class is
    an attribute: ``group.step(x)`` calls the method on all ranks and returns at once.
    """

    # --- what every group has ---

    @property
    def worker_group_name(self) -> str:
        """Name of the group."""
        return self._control.name

    @property
    def worker_cls_name(self) -> str:
        """Name of the worker class."""
        return self._control.cls_name

    @property
    def worker_info_list(self) -> list[WorkerRankInfo[T]]:
        """The workers of the group, in rank order: where each runs, and a view to call it alone."""
        return [
            WorkerRankInfo(info.rank, GroupView(self._control, (info.rank,), warn=False), info)
            for info in self._control.worker_infos()
        ]

    _workers = worker_info_list  # its older name

    @overload
    @staticmethod
    def from_group_name(worker_cls: type[C], group_name: str, async_op: Literal[False] = False) -> WorkerGroup[C]: ...

    @overload
    @staticmethod
    def from_group_name(worker_cls: type[C], group_name: str, async_op: Literal[True]) -> AsyncWork[WorkerGroup[C]]: ...

    @staticmethod
    def from_group_name(
        worker_cls: type[C], group_name: str, async_op: bool = False
    ) -> WorkerGroup[C] | AsyncWork[WorkerGroup[C]]:
        """Return a handle of a running group, which any process of the group's namespace may call.

        This asks the head, one round trip.

        Args:
            worker_cls: the worker class of the group.
            group_name: name of the group.
            async_op: return an AsyncWork at once instead of blocking.

        Raises:
            GroupNotFoundError: no group of that name is running in this namespace.
            ClusterTimeoutError: the head has not answered for 30 s.
        """
        found = attach(worker_cls, group_name)
        work: AsyncWork[WorkerGroup[C]] = AsyncWork.made_of(found, WorkerGroup, "from_group_name()")
        return work if async_op else work.wait()

    @overload
    @staticmethod
    def from_address(worker_cls: type[C], address: WorkerAddress, async_op: Literal[False] = False) -> GroupView[C]: ...

    @overload
    @staticmethod
    def from_address(
        worker_cls: type[C], address: WorkerAddress, async_op: Literal[True]
    ) -> AsyncWork[GroupView[C]]: ...

    @staticmethod
    def from_address(
        worker_cls: type[C], address: WorkerAddress, async_op: bool = False
    ) -> GroupView[C] | AsyncWork[GroupView[C]]:
        """Return a view of the worker at an address, or of all workers for the address of a group.

        Any process of the group's namespace may call this. It asks the head, one round trip.

        Args:
            worker_cls: the worker class of the group.
            address: address of the worker or group.
            async_op: return an AsyncWork at once instead of blocking.

        Raises:
            GroupNotFoundError: no group of that name is running in this namespace.
            PlacementError: the group has no such rank.
            UsageError: the address is of a child process, which cannot be called.
        """
        if len(address.rank_path) > 1:
            raise UsageError(
                f"{address.get_name()} is a child process of a worker, and only workers can be called: take the "
                f"worker's address, {address.get_parent_address().get_name()}"
            )

        def view(control: GroupControl) -> GroupView[C]:
            ranks = address.rank_path or range(control.world_size)
            return GroupView(control, chosen_ranks([ranks], control), warn=False)

        found = attach(worker_cls, address.root_group_name)
        work = AsyncWork.made_of(found, view, "from_address()")
        return work if async_op else work.wait()

    @yielding
    def control(self) -> GroupControl:
        """The library's operations on the group, such as ``group.control.shutdown()``.

        They can be called even if the worker class has methods of the same names.
        """
        return self._control

    @yielding
    def world_size(self) -> int:
        """The number of workers in the group."""
        return self._control.world_size

    @yielding
    def placements(self) -> list[Placement]:
        """The placement of each rank, in rank order."""
        return self._control.placements

    def wait_ready(self, timeout: float | None = None) -> WorkerGroup[T]:
        """Block until every worker is constructed, and return this group. In an event loop use ``await group`` instead.

        Raises:
            WorkerStartError, WorkerError, WorkerDiedError, NameInUseError: the error of the launch.
            CallTimeoutError: *timeout* seconds have passed; the launch goes on.
        """
        self._control.wait_ready(timeout)
        return self

    def shutdown(self, grace: float = 5.0, async_op: bool | None = None) -> Any:
        """End the workers of the group.

        If the worker class has a method ``_close()``, it is called on each worker. Then the workers get SIGTERM, and
        *grace* seconds later SIGKILL. Calling twice is harmless; after a failure the second call tries again. If the
        head stays silent for 5 s, this logs a warning and returns, and the group ends when the head is back.

        Args:
            grace: seconds between SIGTERM and SIGKILL.
            async_op: True to return an AsyncWork at once; False to block until the workers have ended. Default: True in
                a running event loop, False in a plain script.
        """
        return self._control.shutdown(grace, async_op)

    def _close(self) -> Any:
        """End the workers; an older name of `shutdown`."""
        return self._control.shutdown()

    def __await__(self) -> Generator[Any, None, WorkerGroup[T]]:
        try:
            yield from self._control.group.request_ready().__await__()
            return self
        except asyncio.CancelledError:
            if self._control.group.ends_unheld():
                forget_error()
            raise
        finally:
            del self  # a traceback that is kept keeps no handle

    async def __aenter__(self) -> WorkerGroup[T]:
        try:
            return await self
        except asyncio.CancelledError:
            await self._control.shutdown_async()
            raise

    async def __aexit__(self, *_error: object) -> None:
        await self._control.shutdown_async()

    def __enter__(self) -> WorkerGroup[T]:
        try:
            return self.wait_ready()
        except BaseException:
            if self._control.group.ready.error is None:  # Ctrl-C or a signal handler: __exit__ is not called
                self._control.shutdown_blocking()
            raise

    def __exit__(self, *_error: object) -> None:
        self._control.shutdown_blocking()

    def __copy__(self) -> WorkerGroup[T]:
        return WorkerGroup(self._control)

    def __deepcopy__(self, _memo: dict[int, Any]) -> WorkerGroup[T]:
        return WorkerGroup(self._control)

    def __reduce__(self) -> Any:
        return _arrived, (state_of(self._control),)

    def __repr__(self) -> str:
        control = self._control
        return f"<WorkerGroup {control.name!r} of {control.world_size} {control.cls_name}>"

    def _repr_html_(self) -> str:
        return self._control._as_html(repr(self)[1:-1], sorted(self._control.states()))


GroupControl._handle_cls = WorkerGroup


class GroupView(Calls[T]):
    """Some ranks of a group, or all, perhaps with a deadline or retries for their calls.

    `execute_on`, `on_node`, `with_timeout` and `with_retries` return views. Calls on a view do not change the group.
    """

    _ranks: tuple[int, ...]

    def __init__(self, control: GroupControl, ranks: Sequence[int], *, warn: bool, options: CallOptions = ONCE) -> None:
        self._ranks = tuple(ranks)
        self._options = options
        self._unused = warn and not control.yielded  # with yielded names not every use is noticed
        super().__init__(control)

    def _used(self) -> None:
        self._unused = False

    def __copy__(self) -> GroupView[T]:
        self._unused = False
        return GroupView(self._control, self._ranks, warn=False, options=self._options)

    def __deepcopy__(self, _memo: dict[int, Any]) -> GroupView[T]:
        return self.__copy__()

    def __reduce__(self) -> Any:
        self._unused = False
        return _arrived, (state_of(self._control), self._ranks, self._options._asdict())

    def __del__(self) -> None:
        if self.__dict__.get("_unused"):
            warnings.warn(
                f"a view of group {self._control.name!r} (ranks {list(self._ranks)}) was dropped without a call: "
                f"write group.execute_on(...).method(...) in one expression, or keep the view; the group is unchanged",
                RuntimeWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<ranks {list(self._ranks)} of group {self._control.name!r}>"

    def _repr_html_(self) -> str:
        self._unused = False  # who looks at a view in a notebook sees what it is
        return self._control._as_html(repr(self)[1:-1], self._ranks)


def _arrived(carried: bytes, ranks: Sequence[int] | None = None, options: Mapping[str, Any] | None = None) -> Any:
    """Return the group, or the view if *ranks* is given, that another process sent as *carried*; called by pickle."""
    control = control_of(carried)
    if ranks is None:
        return WorkerGroup(control)
    return GroupView(control, ranks, warn=False, options=CallOptions(**(options or {})))
