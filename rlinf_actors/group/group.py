"""WorkerGroup: the proxy that fans method calls out to the workers of a group."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union, cast

from rlinf_actors.errors import PlacementError, UsageError
from rlinf_actors.group import launching
from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.limits import Limits
from rlinf_actors.group.names import YIELDING, check_class, public_methods
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.group.stream import StreamResult
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.model.worker import WorkerInfo
from rlinf_actors.wire import payload

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.placement.strategy import PlacementStrategy
    from rlinf_actors.runtime.peer import Peer

T = TypeVar("T")


@dataclass(frozen=True)
class WorkerRankInfo:
    """An entry of ``worker_info_list``.

    Attributes:
        rank: of the worker.
        worker: calls on this worker alone; ``worker.step()`` gives a result of one rank.
        info: where it runs; complete once the group is ready.
    """

    rank: int
    worker: Any
    info: WorkerInfo


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
            return StreamResult(self._name, self._peers(), parts)
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
    _yielding = property
else:

    class _yielding:
        """A property that an attribute of the instance hides: a worker's own method of that name."""

        def __init__(self, read: Callable[[Any], Any]) -> None:
            self._read = read
            self.__doc__ = read.__doc__

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            return self if instance is None else self._read(instance)


class _Calls:
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
        streams = control.methods.get(name)
        self._used()
        if streams is None:
            return _missing(control, name)
        method = RemoteMethod(control, name, streams, self._ranks_called(), self._timeout_of_calls())
        self.__dict__[name] = method
        return method

    def __dir__(self) -> list[str]:
        self._used()
        return sorted({*object.__dir__(self), *self._control.methods})


class WorkerGroup(_Calls, Generic[T]):
    """A running group of workers. Make one by ``MyWorker.create_group(...).launch(cluster)``.

    ``await group`` waits until every worker is constructed and returns the group, or raises what
    went wrong; ``async with group`` does that and shuts it down at the end. Every public method of
    the worker class is here: ``group.step(x)`` calls it on all ranks and returns at once.
    """

    def __init__(self, control: GroupControl) -> None:
        self._control = control
        for name in YIELDING:
            if name in control.own_methods:
                _Calls.__getattr__(self, name)  # kept on the instance, where it is found before the class's own

    # --- what every group has ---

    @property
    def worker_group_name(self) -> str:
        """The group's name."""
        return self._control.name

    @property
    def worker_cls_name(self) -> str:
        """The worker class's name."""
        return self._control.cls_name

    @property
    def worker_info_list(self) -> list[WorkerRankInfo]:
        """One entry per rank, in rank order."""
        return [
            WorkerRankInfo(info.rank, GroupView(self._control, (info.rank,), warn=False), info)
            for info in self._control.worker_infos()
        ]

    def execute_on(self, *ranks: int | Sequence[int]) -> GroupView[T]:
        """A view of the group with these ranks only; it can be used any number of times.

        Args:
            *ranks: ranks, or one list of them.

        Raises:
            PlacementError: a rank is not in the group.
        """
        return GroupView(self._control, _ranks(ranks, self._control), warn=True)

    @staticmethod
    def from_group_name(worker_cls: type[T], group_name: str) -> WorkerGroup[T]:
        """A handle of a running group, from any process of its namespace. One round trip to the head.

        Raises:
            GroupNotFoundError: no group of that name is running in this namespace.
        """
        return WorkerGroup(launching.attach(worker_cls, group_name))

    # --- newer names ---

    @_yielding
    def control(self) -> GroupControl:
        """The group's own operations, whatever methods the worker class has."""
        return self._control

    @_yielding
    def world_size(self) -> int:
        """Number of ranks."""
        return self._control.world_size

    @_yielding
    def placements(self) -> list[Any]:
        """Where each rank was placed."""
        return self._control.placements

    def wait_ready(self, timeout: float | None = None) -> WorkerGroup[T]:
        """Block until every worker is constructed; returns the group.

        Raises:
            WorkerStartError, WorkerError, WorkerDiedError, NameInUseError: what went wrong.
            CallTimeoutError: it takes longer than *timeout* seconds; it goes on.
        """
        self._control.wait_ready(timeout)
        return self

    def shutdown(self, grace: float = 5.0) -> Any:
        """End the workers: ``_close()`` on each if it has one, SIGTERM, after *grace* seconds SIGKILL.

        In a plain script it returns when they are gone; in a running event loop it returns an
        awaitable. Shutting down twice is fine.
        """
        return self._control.shutdown(grace)

    def with_timeout(self, seconds: float) -> GroupView[T]:
        """A view whose calls have a deadline.

        When it is over the caller gets CallTimeoutError, a call that waits for its turn is never
        started, and one that is a coroutine is cancelled. One that blocks a thread runs to its end.
        """
        if seconds <= 0:
            raise ValueError(f"the timeout is {seconds}; it must be a number of seconds above 0")
        ranks = tuple(range(self._control.world_size))
        return GroupView(self._control, ranks, warn=True, timeout=seconds)

    def _close(self) -> Any:
        """Older name of `shutdown`."""
        return self._control.shutdown()

    def __await__(self) -> Generator[Any, None, WorkerGroup[T]]:
        yield from self._control.group.ready.__await__()
        return self

    async def __aenter__(self) -> WorkerGroup[T]:
        try:
            return await self
        except asyncio.CancelledError:
            await self._control.shutdown_async()
            raise

    async def __aexit__(self, *_error: object) -> None:
        await self._control.shutdown_async()

    def __enter__(self) -> WorkerGroup[T]:
        return self.wait_ready()

    def __exit__(self, *_error: object) -> None:
        self._control.shutdown_blocking()

    def __repr__(self) -> str:
        control = self._control
        return f"<WorkerGroup {control.name!r} of {control.world_size} {control.cls_name}>"


class GroupView(_Calls, Generic[T]):
    """Some ranks of a group; what `WorkerGroup.execute_on` returns. Holds no state on the group."""

    def __init__(
        self, control: GroupControl, ranks: Sequence[int], *, warn: bool, timeout: float | None = None
    ) -> None:
        self._control = control
        self._ranks = tuple(ranks)
        self._timeout = timeout
        self._unused = warn

    def execute_on(self, *ranks: int | Sequence[int]) -> GroupView[T]:
        """A view with these ranks of the group."""
        self._unused = False
        return GroupView(self._control, _ranks(ranks, self._control), warn=True, timeout=self._timeout)

    def with_timeout(self, seconds: float) -> GroupView[T]:
        """The same ranks, with a deadline for each call; see WorkerGroup.with_timeout."""
        self._unused = False
        if seconds <= 0:
            raise ValueError(f"the timeout is {seconds}; it must be a number of seconds above 0")
        return GroupView(self._control, self._ranks, warn=True, timeout=seconds)

    def _used(self) -> None:
        self._unused = False

    def _ranks_called(self) -> Sequence[int] | None:
        return self._ranks

    def _timeout_of_calls(self) -> float | None:
        return self._timeout

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


class GroupLauncher(Generic[T]):
    """A group that is not running yet; what ``create_group`` returns."""

    def __init__(self, cls: type[T], base: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_class(cls, base)
        self._cls = cls
        self._args = args
        self._kwargs = kwargs

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: PlacementStrategy | None = None,
        name: str | None = None,
        max_concurrency: int | None = None,
        isolate_gpu: bool = True,
        catch_system_failure: bool | None = None,
        disable_distributed_log: bool = False,
        *,
        start_method: str = "fork",
        preload: Sequence[str] | None = None,
        env_vars: dict[str, str] | None = None,
        wait_for_hardware: float = 0.0,
        numa_bind: bool = False,
        memory_limit: str | int | None = None,
        pids_limit: int | None = None,
        limits: str = "required",
        restart: RestartPolicy | None = None,
    ) -> Union[WorkerGroup[T], T]:
        """Reserve the name, start the workers, and return without waiting for their constructors.

        Args:
            cluster: where.
            placement_strategy: default: one worker per accelerator, else one worker on node 0.
            name: default ``worker_group_<Class>``.
            max_concurrency: threads for a class without ``async def``; coroutines at a time with.
            isolate_gpu: whether a worker sees its own accelerators only.
            catch_system_failure: accepted for older scripts; a failure always reaches the caller.
            disable_distributed_log: keep this group's lines out of the terminal and of ``distributed_log_dir``.
            start_method: "fork" from a prepared process, or "spawn" for libraries that do not survive a fork.
            preload: modules imported before the fork; default: torch and numpy where this process has them.
            env_vars: variables for this group alone. A visibility variable (CUDA_VISIBLE_DEVICES, ...) must name the
                devices that the placement gives.
            wait_for_hardware: seconds to wait for robots that other groups hold. In a plain script `launch`
                blocks meanwhile; Ctrl-C, or ``shutdown()`` on the group, withdraws it.
            numa_bind: run workers with accelerators on the CPUs of their accelerators' NUMA node, with memory from
                there where it has some; a worker whose node cannot be known says so in its log.
            memory_limit: what each worker and all that it starts may use, in bytes or as "8GiB": the kernel kills all
                of them at once beyond it. Accelerators' memory does not count, shared memory that a worker wrote does.
            pids_limit: how many processes and threads each worker may have, with all that it starts.
            limits: "required": a worker does not start where its limits cannot hold (they need cgroups, see
                ``rlinf-actors doctor``); "best_effort": it starts without them there, and says so in its log.
            restart: when a worker that failed is started again, constructed with the same arguments: calls in flight
                fail, later ones wait for it. Default: never.

        Returns:
            The group. In a plain script the name is reserved when this returns; in a running event loop
            nothing blocks, and ``await group`` and every call raise what went wrong.

        Raises:
            NameInUseError: (a ValueError) the name is taken; plain script only, see above.
            HardwareInUseError: another group holds a robot that this one was placed on; as above.
            PlacementError: the placement does not fit the cluster.
            ConfigError: *env_vars* and the placement show different devices.
            SerializationError: a constructor argument cannot be pickled.
        """
        control = launching.launch(
            self._cls,
            self._args,
            self._kwargs,
            public_methods(self._cls),
            cluster,
            launching.Options(
                strategy=placement_strategy,
                name=name,
                max_concurrency=max_concurrency,
                isolate_accelerator=isolate_gpu,
                show_logs=not disable_distributed_log,
                start_method=start_method,
                preload=preload,
                env=env_vars or {},
                wait_for_hardware=wait_for_hardware,
                numa_bind=numa_bind,
                limits=Limits.of(memory_limit, pids_limit, limits),
                restart=restart or RestartPolicy.never(),
            ),
        )
        return cast("WorkerGroup[T]", WorkerGroup(control))


def _ranks(given: Sequence[int | Sequence[int]], control: GroupControl) -> tuple[int, ...]:
    flat: list[int] = []
    for item in given:
        flat.extend(item if isinstance(item, (list, tuple, range)) else [item])  # type: ignore[list-item]
    if len(set(flat)) < len(flat):
        raise PlacementError(f"execute_on() was given a rank of group {control.name!r} more than once: {flat}")
    if not flat:
        raise PlacementError(f"execute_on() needs at least one rank of group {control.name!r}")
    for rank in flat:
        if not isinstance(rank, int) or not 0 <= rank < control.world_size:
            raise PlacementError(
                f"rank {rank!r} is not in group {control.name!r}, which has ranks 0-{control.world_size - 1}"
            )
    return tuple(flat)


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
