"""Worker: the class that users subclass.

Execution times by tag: what RLinf's metrics are made of.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, ParamSpec, TypeVar, cast, overload

from rlinf_actors.errors import UsageError
from rlinf_actors.group.launcher import GroupLauncher
from rlinf_actors.hardware.torch_platform import torch_platform
from rlinf_actors.model import marks
from rlinf_actors.model.accelerator_table import facts_of
from rlinf_actors.model.address import WorkerAddress, WorkerInfo
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.worker import context as worker_context
from rlinf_actors.worker.children import become_member
from rlinf_actors.worker.device_lock import DeviceLock
from rlinf_actors.worker.lease_guard import LeasePage, LeasePageWriter
from rlinf_actors.worker.manager_proxy import ManagerProxy
from rlinf_actors.worker.worker_messaging import Channels, Messaging

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])


class ExecutionTimes:
    """Seconds by tag; the same tag adds up until it is popped. Any thread."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, tag: str, seconds: float) -> None:
        """Add to a tag."""
        with self._lock:
            self._seconds[tag] = self._seconds.get(tag, 0.0) + seconds

    def pop(self, tag: str) -> float:
        """Take a tag's seconds out.

        Raises:
            ValueError: nothing was recorded under *tag*; the message lists what was.
        """
        with self._lock:
            if tag not in self._seconds:
                known = ", ".join(sorted(self._seconds)) or "none"
                raise ValueError(f"no time was recorded under {tag!r}; recorded tags: {known}")
            return self._seconds.pop(tag)

    def pop_all(self) -> dict[str, float]:
        """Take everything out."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
            return seconds

    @contextmanager
    def measure(self, tag: str) -> Iterator[None]:
        """Record how long the block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(tag, time.perf_counter() - start)


def timed(tag: str | None = None) -> Callable[[F], F]:
    """Decorator for a worker's method: its time is recorded under *tag*, the method's name by default."""

    def decorate(function: F) -> F:
        name = tag or function.__name__
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(self: Any, *args: Any, **kwargs: Any) -> Any:
                with self._timers.measure(name):
                    return await function(self, *args, **kwargs)

            return run_async  # type: ignore[return-value]
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def run_stream(self: Any, *args: Any, **kwargs: Any) -> Any:
                with self._timers.measure(name):
                    async for item in function(self, *args, **kwargs):
                        yield item

            return run_stream  # type: ignore[return-value]
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def run_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
                with self._timers.measure(name):
                    return (yield from function(self, *args, **kwargs))

            return run_generator  # type: ignore[return-value]

        @functools.wraps(function)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._timers.measure(name):
                return function(self, *args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")


class _ClassValue(Generic[T]):
    """An attribute of the class that is worked out when it is read, on the class or on an instance."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read

    def __get__(self, instance: object, owner: type | None = None) -> T:
        return self._read()


def _accelerator_type() -> AcceleratorType:
    context = worker_context.current()
    return context.accelerator_type() if context else AcceleratorType.NO_ACCEL


def _torch_device_type() -> str:
    return facts_of(_accelerator_type()).torch_device_type


def _torch_platform() -> Any:
    return torch_platform(_accelerator_type())


class Worker(Messaging, Channels):
    """Base of all worker classes. One instance runs in each process of a group.

    A class without ``async def`` runs its calls one at a time on the process's main thread; with
    any, everything runs on one event loop of that thread. Methods marked ``@Worker.concurrent()`` have threads of
    their own beside it. Heartbeats and messages never wait for it. A method that is a generator streams its items.

    The attributes below are set before ``__init__`` runs, whether or not it calls ``super().__init__()``.

    Attributes:
        torch_platform: torch's module of the accelerator (``torch.cuda``), ``torch.cpu`` without.
        torch_device_type: ``"cuda"``, ``"npu"``, …, ``"cpu"`` without.
        accelerator_type: of this process's accelerators.
        current_worker: the instance in this process, None in a driver.
    """

    torch_platform: ClassVar[Any] = _ClassValue(_torch_platform)
    torch_device_type: ClassVar[str] = _ClassValue(_torch_device_type)  # type: ignore[assignment]
    accelerator_type: ClassVar[AcceleratorType] = _ClassValue(_accelerator_type)  # type: ignore[assignment]
    current_worker: ClassVar[Worker | None] = None
    timer = staticmethod(timed)
    idempotent = staticmethod(marks.idempotent)
    concurrent = staticmethod(marks.concurrent)

    _rank: int
    _logger: logging.Logger

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Set the attributes of the process's context. Raises UsageError (a RuntimeError) outside a worker."""
        context = worker_context.current()
        parent = kwargs.get("parent_address")
        if parent is None and os.getpid() != context_pid():  # a child process; __init__ will be told for certain
            parent = next((one for one in args if isinstance(one, WorkerAddress)), None)
        if context is None and parent is None:
            raise UsageError(
                f"{cls.__name__} cannot be constructed directly: it runs in processes of its own. "
                f"Use {cls.__name__}.create_group(...).launch(cluster)"
            )
        self = super().__new__(cls)
        if parent is not None:
            self._set_up(context, parent.get_child_address(0), 1)
        else:
            assert context is not None
            self._set_up(context, context.address, context.spec.world_size)
        if parent is None or Worker.current_worker is None or os.getpid() != context_pid():
            Worker.current_worker = self
        return self

    def __init__(
        self, parent_address: WorkerAddress | None = None, world_size: int | None = None, rank: int | None = None
    ) -> None:
        """Nothing is needed here in a group.

        In a process that a worker has started (forked, spawned, or by subprocess; a child of its child too) make that
        process a child of the worker: a member with the address ``group:parent_rank:rank``, which sends, receives,
        broadcasts and uses channels as a worker does. It takes no calls. Others reach it when this returns; it blocks
        for two round trips to its worker. A process is one child, until it ends. In a process that no worker has
        started, and in the worker itself, only the attributes are set.

        Args:
            parent_address: of the worker, or of a child of it.
            world_size: number of the children at that address.
            rank: of this child among them.

        Raises:
            UsageError: another process that runs is this child, the process comes from another worker, or it is another
                child already.
            ClusterTimeoutError: the worker does not answer.
        """
        if parent_address is not None:
            address = parent_address.get_child_address(rank or 0)
            context = become_member(address, world_size or 1)
            self._set_up(context or self._context, address, world_size or 1)

    def _set_up(self, context: worker_context.WorkerContext | None, address: WorkerAddress, world_size: int) -> None:
        environ: Any = context.environ if context else os.environ

        def number(name: str, default: int) -> int:
            text = environ.get(name, "")
            return int(text) if text.lstrip("-").isdigit() else default

        self._worker_address = address
        self._rank = address.rank
        self._world_size = world_size
        self._group_name = address.root_group_name
        self._worker_name = address.get_name()
        self._cluster_node_rank = number("CLUSTER_NODE_RANK", 0)
        self._node_local_rank = number("NODE_LOCAL_RANK", 0)
        self._node_local_world_size = number("NODE_LOCAL_WORLD_SIZE", 1)
        self._local_rank = number("LOCAL_RANK", 0)
        self._local_world_size = number("LOCAL_WORLD_SIZE", 1)
        self._local_accelerator_rank = number("LOCAL_ACCELERATOR_RANK", -1)
        self._accelerator_type = AcceleratorType.named(environ.get("ACCELERATOR_TYPE") or "NO_ACCEL")
        self._accelerator_model = environ.get("ACCELERATOR_MODEL", "")
        ranks = environ.get("LOCAL_HARDWARE_RANKS", "")
        self._local_hardware_ranks = [int(rank) for rank in ranks.split(",") if rank.strip()]
        self._logger = worker_context.make_logger(self._worker_name)
        self._timers = ExecutionTimes()
        self._context = context
        self._own_ports = context.ports if context else HeldPorts()

    # --- launching ---

    @classmethod
    def create_group(cls: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> GroupLauncher[W]:
        """A group of this class that is not running yet: call ``launch`` on it.

        Args:
            *args, **kwargs: of the class's constructor, the same for every rank.

        Raises:
            UsageError: the class has a public method whose name the group itself needs, or a mark that cannot be.
        """
        return GroupLauncher(cast("type[W]", cls), Worker, args, kwargs)  # typed so that the arguments are checked

    # --- who am I ---

    @property
    def worker_address(self) -> WorkerAddress:
        """This worker's address, ``group:rank``."""
        return self._worker_address

    @property
    def worker_info(self) -> WorkerInfo:
        """What others may know of this worker."""
        context = self._context
        return WorkerInfo(
            address=self._worker_address,
            rank=self._rank,
            group_world_size=self._world_size,
            cluster_node_rank=self._cluster_node_rank,
            accelerator_type=self._accelerator_type,
            accelerator_model=self._accelerator_model,
            accelerator_rank=self._local_accelerator_rank,
            node_ip=context.place.node_ip if context else "",
            node_port=context.tcp_port if context else 0,
            available_accelerators=[d for d in os.environ.get("VISIBLE_DEVICES", "").split(",") if d],
            hardware_infos=self.hardware_infos,
        )

    @property
    def has_accelerator(self) -> bool:
        """Whether this worker was placed on an accelerator."""
        return self._accelerator_type is not AcceleratorType.NO_ACCEL

    @property
    def hardware_type(self) -> str:
        """The type of what this worker was placed on: an accelerator type, a robot's type, or NO_ACCEL."""
        infos = self.hardware_infos
        return infos[0].type if infos else self._accelerator_type.value

    @property
    def hardware_infos(self) -> list[Any]:
        """The robots or other configured hardware this worker was placed on: the HardwareInfo that its type defines.

        In a child they are its worker's.
        """
        if self._context is None:
            return []
        return list(self._context.extras.get("hardware_infos", {}).get(self._worker_address.rank_path[0], []))

    @property
    def device_lock(self) -> DeviceLock:
        """The lock over this worker's accelerators, shared by all workers of its node; see DeviceLock.

        Raises:
            UsageError: in a child process of a worker.
        """
        context = self._context
        if context is None or not context.is_here or context.device_lock is None:
            raise UsageError(
                f"{self._worker_name} is a child process of a worker, and device_lock is the worker's: acquire it "
                f"there before the child uses the accelerators"
            )
        return context.device_lock

    @property
    def manager_proxy(self) -> ManagerProxy:
        """Looks up other workers of the job."""
        return ManagerProxy(self._connected("manager_proxy"))

    def get_name(self) -> str:
        """This worker's name, ``group:rank``."""
        return self._worker_name

    def get_parent_rank(self) -> int:
        """Rank of the worker that made this child process. Raises ValueError in a worker of a group."""
        return self._worker_address.get_parent_rank()

    @overload
    def check_worker_alive(self, name: str, async_op: Literal[False] = False) -> bool: ...

    @overload
    def check_worker_alive(self, name: str, async_op: Literal[True]) -> AsyncWork[bool]: ...

    def check_worker_alive(self, name: str, async_op: bool = False) -> bool | AsyncWork[bool]:
        """Return True if the worker called *name* (``group:rank``) is running; see `ManagerProxy.is_alive`."""
        proxy = ManagerProxy(self._connected("check_worker_alive()"))
        return proxy.is_alive(name, async_op=True) if async_op else proxy.is_alive(name)

    def acquire_free_port(self) -> int:
        """A TCP port on this node that is given to nobody else as long as this worker lives.

        It is held bound on every address, not listening. A listener that sets SO_REUSEADDR or SO_REUSEPORT takes it
        as it is: asyncio, http.server, ZeroMQ, gRPC and torch's TCPStore do, in this process or another one of this
        user. For one that sets neither call `release_free_port` right before it binds. It is kept from whoever asks
        for any port; a program that binds this very number is let in.

        Raises:
            OSError: there is no free port.
        """
        return self._own_ports.hold()

    def release_free_port(self, port: int) -> None:
        """Hold a port of `acquire_free_port` no more, so that a listener without socket options can bind it.

        From here until it does, the kernel may give the port to somebody else. A process that this worker forked
        after `acquire_free_port` holds the port too, until it ends.

        Raises:
            UsageError: (a RuntimeError) the port is not held here.
        """
        self._own_ports.release(port)

    @property
    def lease_page(self) -> LeasePage:
        """Shared memory that says until when this worker may move its robots, for code that Python cannot stop.

        A C or C++ control loop reads it before each command: ``rlinf_lease_held(page)`` of ``rlinf_lease.h``, with
        `LeasePage.address` for *page*. In a worker without robots the page never runs out.

        Raises:
            UsageError: in a process that was not forked by a worker of a group.
        """
        context = self._connected("lease_page")
        if context.lease_page is None:
            if context.spec.claims:
                raise UsageError(f"{self._worker_name} was not forked by its worker, which alone has the lease_page")
            context.lease_page = LeasePageWriter().page
        return context.lease_page

    def keep_for_stop(self, pid: int) -> None:
        """Let a process that this worker started run on while `on_lease_lost` does, since the robot is reached by it.

        All others are stopped (SIGSTOP) before `on_lease_lost` begins, so that none of them moves the robot after the
        stop command. What the process starts is kept too. `on_lease_lost` has to bring it to rest. All are killed
        when `on_lease_lost` has returned. Does nothing in a worker without robots.

        Args:
            pid: of the process, such as ``subprocess.Popen(...).pid``.

        Raises:
            UsageError: there is no such process, this worker did not start it, or this is a child process of a worker.
        """
        context = self._context
        if context is None or not context.is_here or context.is_child:
            raise UsageError(f"{self._worker_name} is a child process of a worker: call keep_for_stop() in the worker")
        if context.guard is not None and (reason := context.guard.keep(pid)):
            raise UsageError(f"{self._worker_name} cannot keep process {pid} for its stop: {reason}")

    def on_lease_lost(self) -> None:
        """Make this worker's robots safe: send the stop command. Define it where a worker is placed on robots.

        Such a worker holds a lease, 2 s by default, that the head renews through agentd every 0.5 s. The method
        runs when the lease was not renewed (a cut network, a head or an agentd that died or stands still), when the
        worker's own process stood still for as long as the lease lasts (SIGSTOP, a suspended machine), when it is
        taken away (the owner of the group ended, `rlinf-actors estop`, the group is shut down and `_close()` is not
        defined or did not return), at SIGTERM, SIGINT and SIGHUP, and when agentd or the template process dies. It
        runs at most once, also while ``__init__`` is still running, and never in a worker without robots. After it
        the process ends.

        Thread: one of its own. All other threads of yours stand still before it begins and begin nothing more;
        the main thread stops within 0.2 s unless it is in C code, and the event loop, if there is one, with it.
        Processes that the worker started are stopped, except those of `keep_for_stop`. It may start new ones.
        A lock that a thread holds is given back after 0.25 s by raising SystemExit there, so ``finally`` blocks
        may run then. It must be a plain ``def`` without arguments; what it raises is printed to stderr.

        Time: it has 1 s. With a lease of 2 s it begins at the latest 1.9 s after the last word of the head.

        What cannot be promised: C code that holds the interpreter's lock delays it (see `lease_page`), and a worker
        that is ended by kill -9, by the kernel or by a crash in C code does not run it. So the robot's controller
        needs a watchdog of its own.
        """

    @property
    def restart_count(self) -> int:
        """How often this rank was started again: 0 in the first worker, 1 in the one that took its place, ..."""
        return self._context.spec.incarnation if self._context else 0

    def on_restart(self) -> Any:
        """Called in a worker that takes the place of one that failed, before its first call; see RestartPolicy.

        The constructor has run, with the arguments of the first one. What the other one had in memory is gone: load
        a checkpoint, or reset what it drives, here. May be a plain ``def`` or an ``async def``, without arguments. What
        it raises ends this worker too, which counts as a failure.
        """

    def _connected(self, what: str) -> worker_context.WorkerContext:
        if self._context is None:
            raise UsageError(f"{what} needs a worker of a group; {self._worker_name} is a child process of one")
        return self._context

    # --- logging ---

    def log_debug(self, message: object) -> None:
        """Log at DEBUG."""
        self._logger.debug("%s", message, stacklevel=2)

    def log_info(self, message: object) -> None:
        """Log at INFO."""
        self._logger.info("%s", message, stacklevel=2)

    def log_warning(self, message: object) -> None:
        """Log at WARNING."""
        self._logger.warning("%s", message, stacklevel=2)

    def log_error(self, message: object) -> None:
        """Log at ERROR."""
        self._logger.error("%s", message, stacklevel=2)

    def log_on_first_rank(self, message: object) -> None:
        """Log at INFO in rank 0 only."""
        if self._rank == 0:
            self._logger.info("%s", message, stacklevel=2)

    def log_on_last_rank(self, message: object) -> None:
        """Log at INFO in the last rank only."""
        if self._rank == self._world_size - 1:
            self._logger.info("%s", message, stacklevel=2)

    # --- timers ---

    def worker_timer(self, tag: str | None = None) -> AbstractContextManager[None]:
        """Record how long a ``with`` block takes, in seconds.

        Args:
            tag: the name it is kept under; the calling method's name by default.
        """
        if tag is None:
            frame = inspect.currentframe()
            assert frame is not None
            assert frame.f_back is not None
            tag = frame.f_back.f_code.co_name
        return self._timers.measure(tag)

    def pop_execution_time(self, tag: str) -> float:
        """Seconds recorded under *tag* since it was last popped. Raises ValueError if there are none."""
        return self._timers.pop(tag)

    def pop_execution_times(self) -> dict[str, float]:
        """All recorded seconds by tag; they are forgotten."""
        return self._timers.pop_all()


def context_pid() -> int:
    """Process id of the worker this process is or was forked from, 0 in a driver."""
    context = worker_context.current()
    return context.pid if context else 0
