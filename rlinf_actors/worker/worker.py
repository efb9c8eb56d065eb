"""Worker: the class that users subclass.

Drivers import this module too, to describe a group of a subclass (`create_group`). In a worker process `worker.main`
installs the context and then constructs the subclass on the main thread.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar, cast, overload

from rlinf_actors.errors import UsageError
from rlinf_actors.group.launcher import GroupLauncher
from rlinf_actors.model import marks
from rlinf_actors.model.address import WorkerAddress, WorkerInfo
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.worker import class_values
from rlinf_actors.worker import context as worker_context
from rlinf_actors.worker.children import become_member
from rlinf_actors.worker.class_values import ClassValue
from rlinf_actors.worker.device_lock import DeviceLock
from rlinf_actors.worker.execution_times import ExecutionTimes, timed
from rlinf_actors.worker.leasepage import LeasePage, LeasePageWriter
from rlinf_actors.worker.manager_proxy import ManagerProxy, is_alive
from rlinf_actors.worker.older_names import OlderNames
from rlinf_actors.worker.worker_messaging import Channels
from rlinf_actors.worker.worker_profiling import Profiled
from rlinf_actors.worker.worker_routing import Routing

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])


P = ParamSpec("P")
W = TypeVar("W")


class Worker(Routing, Channels, OlderNames, Profiled):
    """Base of all worker classes. Each process of a group has one instance.

    A class without ``async def`` runs its calls one at a time on the main thread of its process. A class with any
    ``async def`` runs all calls on one event loop of that thread. Methods marked ``@Worker.concurrent()`` have threads
    of their own. Heartbeats and messages never wait for user code. A method that is a generator streams its items.

    All attributes are set before ``__init__`` runs, even if it does not call ``super().__init__()``.

    Attributes:
        torch_platform: torch's module of the accelerator (``torch.cuda``); None without an accelerator.
        torch_device_type: ``"cuda"``, ``"npu"``, …; None without an accelerator.
        accelerator_type: type of the accelerators of this worker, in a driver of its machine; NO_ACCEL without any.
        logger: the logger of this worker, in a driver that of the driver.
        current_worker: the instance in this process, None in a driver.
    """

    torch_platform: ClassVar[Any] = ClassValue(class_values.torch_platform)
    torch_device_type: ClassVar[str | None] = ClassValue(class_values.torch_device_type)  # type: ignore[assignment]
    accelerator_type: ClassVar[AcceleratorType] = ClassValue(class_values.accelerator_type)  # type: ignore[assignment]
    logger: ClassVar[logging.Logger] = ClassValue(class_values.logger)  # type: ignore[assignment]
    current_worker: ClassVar[Worker | None] = None
    timer = staticmethod(timed)
    idempotent = staticmethod(marks.idempotent)
    concurrent = staticmethod(marks.concurrent)

    _rank: int
    _logger: logging.Logger

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Set the attributes from the context of the process.

        Raises:
            UsageError: (a RuntimeError) this process is no worker.
        """
        context = worker_context.current()
        in_worker = context is not None and context.is_here  # or in a child that is a member already
        parent = kwargs.get("parent_address")
        if parent is None and not in_worker:  # a child process: __init__ gets the argument by name
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
        if parent is None or Worker.current_worker is None or not in_worker:
            Worker.current_worker = self
        if context is not None and context.constructing is cls:
            context.constructing, context.instance = None, self
        return self

    def __init__(
        self, parent_address: WorkerAddress | None = None, world_size: int | None = None, rank: int | None = None
    ) -> None:
        """Make this process a child of a worker, if *parent_address* is given. A worker of a group needs no arguments.

        A child is a process that a worker or its child has started: forked, spawned, or by subprocess. Its address is
        ``group:parent_rank:rank``. A child sends, receives, broadcasts and uses channels as a worker does, and takes no
        calls. The constructor blocks for two round trips to the worker; after that, peers reach the child. A process
        cannot become a second child. In the worker itself, and in a process that no worker has started, only the
        attributes are set.

        Args:
            parent_address: address of the worker, or of a child of it.
            world_size: number of children at that address.
            rank: rank of this child among them.

        Raises:
            UsageError: another living process is this child, another worker started this process, or this process is
                another child already.
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

        self._worker_address = context.address if context is not None and context.address == address else address
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
        self._accelerator_type = worker_context.accelerator_type(environ)
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
        """Return a group of this class that does not run yet: call ``launch`` on it.

        Args:
            *args, **kwargs: arguments of the constructor, the same for every rank.

        Raises:
            UsageError: a public method has a name that the group itself needs, or an invalid mark.
        """
        # the cast lets type checkers check the arguments
        return GroupLauncher(cast("type[W]", cls), Worker, args, kwargs)

    # --- identity ---

    def __repr__(self) -> str:
        if "_worker_address" not in self.__dict__:  # made by object.__new__
            return super().__repr__()
        return f"{self._worker_address.get_parent_address().get_name()}(rank={self._rank})"

    @property
    def worker_address(self) -> WorkerAddress:
        """Address of this worker."""
        return self._worker_address

    @property
    def worker_info(self) -> WorkerInfo:
        """Rank, node and hardware of this worker."""
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
            code_hash=context.spec.code if context else "",
        )

    @property
    def has_accelerator(self) -> bool:
        """True if this worker was placed on an accelerator."""
        return self._accelerator_type is not AcceleratorType.NO_ACCEL

    @property
    def hardware_type(self) -> str:
        """Type of the hardware that this worker was placed on: an accelerator type, a robot type, or NO_ACCEL."""
        infos = self.hardware_infos
        return infos[0].type if infos else self._accelerator_type.value

    @property
    def hardware_infos(self) -> list[Any]:
        """The robots or other configured hardware of this worker, each as the HardwareInfo of its type.

        A child has the list of its worker.
        """
        if self._context is None:
            return []
        return list(self._context.extras.get("hardware_infos", {}).get(self._worker_address.rank_path[0], []))

    @property
    def device_lock(self) -> DeviceLock:
        """Lock for the exclusive use of this worker's accelerators among the workers of its node; see DeviceLock.

        Raises:
            UsageError: this is a child process of a worker.
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
        """The ManagerProxy of this worker, which finds other workers of the job.

        Raises:
            UsageError: this is a child process without a context.
        """
        return ManagerProxy(self._connected("manager_proxy"))

    def get_name(self) -> str:
        """Return the name of this worker, ``group:rank``."""
        return self._worker_name

    def get_parent_rank(self) -> int:
        """Return the rank of the worker that started this child process.

        Raises:
            ValueError: this is a worker of a group.
        """
        return self._worker_address.get_parent_rank()

    @overload
    @staticmethod
    def check_worker_alive(name: str, async_op: Literal[False] = False) -> bool: ...

    @overload
    @staticmethod
    def check_worker_alive(name: str, async_op: Literal[True]) -> AsyncWork[bool]: ...

    @staticmethod
    def check_worker_alive(name: str, async_op: bool = False) -> bool | AsyncWork[bool]:
        """Return True if a worker of this job is starting or running. Workers and drivers may ask.

        Args:
            name: name of the worker, ``group:rank``.
            async_op: return an AsyncWork of the result.

        Raises:
            UsageError: *name* is that of a child of a worker, or this process has no Cluster.
        """
        work = is_alive(name)
        return work if async_op else work.wait()

    def acquire_free_port(self, max_port_num: int | None = None) -> int:
        """Reserve a TCP port of this node until this worker ends, and return the number of the port.

        The worker keeps the port bound on every address, but does not listen. So the kernel does not give the port to a
        program that asks for any free port. A listener that sets SO_REUSEADDR or SO_REUSEPORT can bind the port at
        once, in this process or in another process of this user; asyncio, http.server, ZeroMQ, gRPC and torch's
        TCPStore set one of these options. Before you start a listener that sets neither, call `release_free_port`.

        Args:
            max_port_num: largest port that will do; None for any. Use it for a server that adds to its port.

        Raises:
            OSError: there is no free port.
        """
        return self._own_ports.hold(max_port_num)

    def release_free_port(self, port: int) -> None:
        """Release a port that `acquire_free_port` has reserved, so that a listener without socket options can bind it.

        Until the listener binds the port, the kernel may give it to another program. A process that this worker forked
        after `acquire_free_port` keeps the port too, until that process ends.

        Raises:
            UsageError: (a RuntimeError) this worker has not reserved the port.
        """
        self._own_ports.release(port)

    @property
    def lease_page(self) -> LeasePage:
        """Shared memory with the time until which this worker may move its robots, for code that Python cannot stop.

        A C or C++ control loop reads the page before each command: ``rlinf_lease_held(page)`` of ``rlinf_lease.h``,
        with `LeasePage.address` for *page*. In a worker without robots the lease never ends.

        Raises:
            UsageError: a worker of a group has not forked this process.
        """
        context = self._connected("lease_page")
        if context.lease_page is None:
            if context.spec.claims:
                raise UsageError(f"{self._worker_name} was not forked by its worker, which alone has the lease_page")
            context.lease_page = LeasePageWriter().page
        return context.lease_page

    def keep_for_stop(self, kept: int | threading.Thread) -> None:
        """Let a process that this worker started, with its descendants, or a thread run while `on_lease_lost` runs.

        Use this for a process that talks to the robot, or a thread of the robot's SDK that ``sdk.stop()`` needs.
        `on_lease_lost` must bring it to rest, and it must send the robot nothing else. All other processes are stopped
        (SIGSTOP) and all other threads are held before `on_lease_lost` begins, so that none of them moves the robot
        after the stop command. All processes are killed when `on_lease_lost` has returned. Without effect in a worker
        without robots.

        Args:
            kept: pid of the process, such as ``subprocess.Popen(...).pid``; or the thread, which must run.

        Raises:
            UsageError: there is no such process, this worker did not start it, the thread does not run or is the main
                thread, or this is a child process of a worker.
        """
        context = self._context
        if context is None or not context.is_here or context.is_child:
            raise UsageError(f"{self._worker_name} is a child process of a worker: call keep_for_stop() in the worker")
        if context.guard is None:
            return
        what = f"thread {kept.name}" if isinstance(kept, threading.Thread) else f"process {kept}"
        keep = context.guard.keep_thread if isinstance(kept, threading.Thread) else context.guard.keep
        if reason := keep(kept):  # type: ignore[arg-type]
            raise UsageError(f"{self._worker_name} cannot keep {what} for its stop: {reason}")

    def on_lease_lost(self) -> None:
        """Make the robots of this worker safe: send the stop command. Define it in a worker that is placed on robots.

        Such a worker holds a lease, 2 s by default, that the head renews through agentd every 0.5 s. The method runs at
        most once, also while ``__init__`` runs, and never in a worker without robots. The process ends after it. It
        runs when

        * the lease was not renewed: a cut network, or a head or an agentd that died or was stopped;
        * the process of the worker did not run for as long as the lease lasts: SIGSTOP, a suspended machine;
        * the lease is revoked: the owner of the group ended, `rlinf-actors estop`, or the group is shut down and
          `_close()` is not defined or did not return;
        * the process gets SIGTERM, SIGINT or SIGHUP;
        * agentd or the template process dies.

        Thread: one of its own. All other threads of user code are stopped before it begins. The main thread, with its
        event loop, stops within 0.2 s unless it is in C code. Processes that the worker started are stopped, except
        those of `keep_for_stop`; the method may start new ones. If the method waits for a lock 0.25 s after its start,
        SystemExit is raised in the stopped threads. They then release the locks of their ``with`` blocks, and may run
        ``finally`` blocks: so the method may take a Lock, an RLock, a Condition or a queue.Queue, but no semaphore. The
        method must be a plain ``def`` without arguments. An error that it raises is printed to stderr.

        Time: the method has 1 s. With a lease of 2 s it begins at most 1.9 s after the last renewal of the head.

        Limits: C code that holds the interpreter's lock delays the method (see `lease_page`). A worker that is ended by
        kill -9, by the kernel or by a crash in C code does not run it. So the controller of the robot needs a watchdog
        of its own.
        """

    @staticmethod
    def stop_hardware(hardware_infos: list[Any]) -> None:
        """Stop the robots from outside the worker. Define it where the robot's controller takes a second connection.

        It needs nothing of the worker, so no thread, lock or library of the worker can be in its way: it runs when
        nothing of the worker runs any more, also if the worker crashed, was killed, or never ran ``on_lease_lost``. It
        does not run after an orderly end, when ``_close()`` has returned. Define it as a plain static method or class
        method: a connection of its own, the stop command, and its confirmation.

        Process and thread: the main thread of a process beside the worker, which was forked before the worker and has
        imported the class for this alone. So the class's module is imported twice, and must not connect to the robot.
        An error is printed to the worker's stderr, and is part of the worker's exit report.

        Time: it has 1 s, after which the kernel ends the process. It begins when the worker has ended, at the latest
        0.1 s after the worker was killed.

        Args:
            hardware_infos: the robots that the worker claims (`hardware_infos`), and those whose lease it inherited.
        """

    @property
    def restart_count(self) -> int:
        """Number of restarts of this rank: 0 in the first worker, 1 in the worker that replaced it, ..."""
        return self._context.spec.incarnation if self._context else 0

    def on_restart(self) -> Any:
        """Prepare a worker that replaces a failed one: load a checkpoint, or reset a device. See RestartPolicy.

        Runs after the constructor, which gets the arguments of the first worker, and before the first call. Define it
        as a plain ``def`` or an ``async def``, without arguments. An error ends this worker, and counts as a failure.
        """

    def on_world_size_changed(self) -> Any:
        """Follow a change of the number of ranks of this worker's group, which `_world_size` has already.

        Called between other calls, as a call of the group's owner, after `WorkerGroup.add_ranks` and `remove_ranks`,
        but not in the new workers. Define it as a plain ``def`` or an ``async def``, without arguments. Its error is
        reported like that of a call that nobody awaits.
        """

    def _connected(self, what: str) -> worker_context.WorkerContext:
        if self._context is None:
            raise UsageError(f"{what} needs a worker of a group; {self._worker_name} is a child process of one")
        return self._context

    # --- logging ---

    def log_debug(self, msg: object) -> None:
        """Log *msg* at DEBUG."""
        self._logger.debug("%s", msg, stacklevel=2)

    def log_info(self, msg: object) -> None:
        """Log *msg* at INFO."""
        self._logger.info("%s", msg, stacklevel=2)

    def log_warning(self, msg: object) -> None:
        """Log *msg* at WARNING."""
        self._logger.warning("%s", msg, stacklevel=2)

    def log_error(self, msg: object) -> None:
        """Log *msg* at ERROR."""
        self._logger.error("%s", msg, stacklevel=2)

    def log_on_first_rank(self, msg: object) -> None:
        """Log *msg* at INFO in rank 0; do nothing in other ranks."""
        if self._rank == 0:
            self._logger.info("%s", msg, stacklevel=2)

    def log_on_last_rank(self, msg: object) -> None:
        """Log *msg* at INFO in the last rank; do nothing in other ranks."""
        if self._rank == self._world_size - 1:
            self._logger.info("%s", msg, stacklevel=2)

    # --- timers ---

    def worker_timer(self, tag: str | None = None, trace: bool = True) -> AbstractContextManager[None]:
        """Return a context manager that records the time of its ``with`` block, in seconds.

        Args:
            tag: the tag of the time; by default the name of the calling method.
            trace: False to leave the block out of a trace.
        """
        if tag is None:
            frame = inspect.currentframe()
            assert frame is not None
            assert frame.f_back is not None
            tag = frame.f_back.f_code.co_name
        # tests of RLinf make workers by object.__new__, which have no group
        return self._timers.measure(tag, getattr(self, "_group_name", "worker") if trace else None)

    def pop_execution_time(self, tag: str) -> float:
        """Remove the time recorded under *tag*, and return it in seconds.

        Raises:
            ValueError: no time was recorded under *tag* since the last pop.
        """
        return self._timers.pop(tag)

    def pop_execution_times(self, tags: Sequence[str] | None = None) -> dict[str, float]:
        """Remove all recorded times, or those under *tags*, and return them: seconds by tag."""
        return self._timers.pop_all(tags)
