"""GroupLauncher: what ``create_group`` returns, and the options of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlinf_actors.group import launch
from rlinf_actors.group.class_facts import check_class
from rlinf_actors.group.group import WorkerGroup
from rlinf_actors.group.group_spec import Limits
from rlinf_actors.model.restart import RestartPolicy

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.placement.strategies import PlacementStrategy

T = TypeVar("T")


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
        robot_owner_must_answer: bool | None = None,
        detached: bool = False,
        get_if_exists: bool = False,
    ) -> WorkerGroup[T]:
        """Reserve the name, start the workers, and return without waiting for their constructors.

        Args:
            cluster: where.
            placement_strategy: default: one worker per accelerator, else one worker on node 0.
            name: default ``worker_group_<Class>``.
            max_concurrency: threads for a class without ``async def``; coroutines at a time with. Those of methods
                marked ``@Worker.concurrent()`` come on top.
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
                fail (unless made through ``with_retries``), later ones wait for it. Default: never.
            robot_owner_must_answer: whether a group with robots ends when this process stands still for a robot lease
                (SIGSTOP, a debugger, C code that holds the interpreter's lock), although its process is there. Default:
                what RLINF_ACTORS_ROBOT_OWNER_MUST_ANSWER says, else True where a robot is on another host.

            detached: launched by a driver on a head that stands by itself: the group outlives the driver, in its
                namespace, until it is shut down by a handle from `WorkerGroup.from_group_name` or ended by
                ``rlinf-actors groups stop``. Launched by a worker: it ends with the job's driver instead of the worker.
                In a plain script `launch` blocks until every worker is constructed, and in a running loop
                ``await group`` does; a launcher that ends before takes the group along. Not with a restart policy,
                and not for groups with robots.
            get_if_exists: if a group of that name and of a class of that name is running in this namespace, return a
                handle of it, and start nothing: its placement and arguments stay what they are. Of two processes that
                launch at the same time, one starts the group.

        Returns:
            The group. In a plain script the name is reserved when this returns; in a running event loop
            nothing blocks, and ``await group`` and every call raise what went wrong.

        Raises:
            NameInUseError: (a ValueError) the name is taken; plain script only, see above.
            HardwareInUseError: another group holds a robot that this one was placed on; as above.
            EmergencyStopError: it uses robots, and an emergency stop is in force; as above.
            UsageError: an argument is of another kind, such as a strategy in the place of the cluster.
            PlacementError: the placement does not fit the cluster.
            ConfigError: *env_vars* and the placement show different devices.
            SerializationError: a constructor argument cannot be pickled.
        """
        launch.check_arguments(cluster, placement_strategy, restart)
        control = launch.launch(
            self._cls,
            self._args,
            self._kwargs,
            cluster,
            launch.Options(
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
                robot_owner_must_answer=robot_owner_must_answer,
                detached=detached,
                get_if_exists=get_if_exists,
            ),
        )
        return WorkerGroup(control)
