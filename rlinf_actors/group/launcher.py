"""Launching a group and attaching to one: from a class and a cluster to a handle.

GroupLauncher: what ``create_group`` returns, and the options of a launch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlinf_actors.cluster.service import import_paths
from rlinf_actors.errors import GroupNotFoundError, NameInUseError, SerializationError, UsageError
from rlinf_actors.group import group_spec
from rlinf_actors.group.class_facts import LEASE_HOOK, check_class, check_lease_hook, facts_of
from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.group import WorkerGroup
from rlinf_actors.group.group_spec import (
    START_METHODS,
    LaunchOptions,
    Limits,
    class_reference,
    hardware_of,
    worker_specs,
)
from rlinf_actors.hardware.extensions import providers
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.placement.strategies import default_strategy
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import Construction, RemoteGroup
from rlinf_actors.settings import Settings, for_workers
from rlinf_actors.wire import failure, frames, payload
from rlinf_actors.wire.client_messages import Launch
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import MAX_SIZE
from rlinf_actors.wire.values import WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.placement.strategies import PlacementStrategy
    from rlinf_actors.runtime.runtime import Runtime

log = logging.getLogger(__name__)

LIFETIMES = 7
"""The first protocol whose heads know groups that outlive their launcher, and launches that take a running group."""
PRELOADED = ("torch", "numpy")
"""Imported before the fork where the launching process has them: each costs every worker its import otherwise."""


@dataclass(frozen=True)
class Options:
    """Arguments of ``launch`` in one normal form; see GroupLauncher.launch."""

    strategy: PlacementStrategy | None = None
    name: str | None = None
    max_concurrency: int | None = None
    isolate_accelerator: bool = True
    show_logs: bool = True
    start_method: str = "fork"
    preload: Sequence[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    wait_for_hardware: float = 0.0
    numa_bind: bool = False
    limits: Limits = field(default_factory=Limits)
    restart: RestartPolicy = field(default_factory=RestartPolicy.never)
    robot_owner_must_answer: bool | None = None
    detached: bool = False
    get_if_exists: bool = False


def launch(
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cluster: Cluster,
    options: Options,
) -> GroupControl:
    """Place, reserve and start a group; see GroupLauncher.launch for what it raises."""
    name = options.name or f"worker_group_{cls.__name__}"
    _check(name, options)
    check_lease_hook(cls)
    runtime, title = cluster.runtime, class_reference(cls) or f"{cls.__module__}:{cls.__qualname__}"
    if options.get_if_exists:
        running = _running(runtime, cluster.namespace, name)
        if running is not None:
            return _existing(running, cls, title, runtime)
    strategy = options.strategy or default_strategy(cluster)
    placements = sorted(strategy.get_placement(cluster, options.isolate_accelerator), key=lambda one: one.rank)
    if len(placements) > MAX_SIZE:
        raise UsageError(f"{name!r} would have {len(placements):,} workers; a group has at most {MAX_SIZE:,}")
    specs = worker_specs(name, cluster.namespace, placements, cluster, _for_workers(options, cluster))
    _check_lifetime(name, specs, cluster, options)
    _warn_of_robots(cls, specs)
    reference = class_reference(cls)
    hardware = hardware_of(placements, cluster)
    extras = {"hardware_infos": hardware, **cluster.extras()}
    parts = _encode(cls, reference, args, kwargs, extras, runtime.copy)
    nodes = [cluster.get_node_info(spec.node_rank) for spec in specs]
    node_names = [cluster.node_name(node.node_rank) for node in nodes]
    described = group_spec.detail_of(placements, nodes, node_names, hardware, options.restart.restarts)
    modules = [type(info).__module__ for infos in hardware.values() for info in infos]
    modules += [node.accelerator_registered_by for node in nodes if node.accelerator_registered_by]
    again = options.restart.restarts
    construction = Construction(
        reference,
        parts,
        options.max_concurrency or 0,
        _failure,
        providers(modules),
        again,
        options.detached,
        lost=runtime.lost,
    )
    ids = [spec.id for spec in specs]
    group = runtime.groups.new(cluster.namespace, name, node_names, construction, ids, options.wait_for_hardware)
    group.detail = group_spec.encode(described)  # also for an attach() here before the head has answered
    group.cls = title
    group.takes_running = options.get_if_exists
    message = Launch(
        cluster.namespace,
        name,
        title,
        specs,
        group.detail,
        wait_s=options.wait_for_hardware,
        outlives=options.detached,
        get_if_exists=options.get_if_exists,
    )
    future = runtime.io.submit(runtime.groups.launch(message, group))
    if not _in_event_loop():
        try:
            future.result()  # one round trip; with a loop running, `await group` and every call raise instead
        except BaseException:
            future.cancel()  # Ctrl-C while it waits for hardware withdraws it
            group.error_was_raised()
            raise
        if options.get_if_exists:  # another thread may have got the running group meanwhile
            group = runtime.groups.existing(cluster.namespace, name) or group
        if options.detached:
            _wait_until_up(runtime, group)
    return GroupControl(runtime, group, facts_of(cls))


def _running(runtime: Runtime, namespace: str, name: str) -> RemoteGroup | None:
    """Return the handle that this process has of a running group.

    One that arrived and was never used may be of a group that has ended: it is looked up first. In a running loop,
    which does not wait, that is left to its first use.
    """
    while (group := runtime.groups.existing(namespace, name)) is not None:
        if group.found or group.owned or _in_event_loop():
            return group
        with contextlib.suppress(GroupNotFoundError):
            runtime.io.submit(runtime.groups.reach(group)).result()
    return None


def _existing(group: RemoteGroup, cls: type, title: str, runtime: Runtime) -> GroupControl:
    """Return the operations of a group of which this process has a handle."""
    if group.cls and group.cls.rpartition(":")[2] != title.rpartition(":")[2]:
        raise NameInUseError(
            f"the group named {group.name!r} in namespace {group.namespace!r} is of class {group.cls}, and not of "
            f"{title}: give this one another name, or shut that one down first"
        )
    return GroupControl(runtime, group, facts_of(cls))


def _check_lifetime(name: str, specs: Sequence[WorkerSpec], cluster: Cluster, options: Options) -> None:
    """Refuse a group that is to outlive its launcher where it cannot.

    Raises:
        UsageError: says why, and what to do.
    """
    if (options.detached or options.get_if_exists) and cluster.runtime.protocol < LIFETIMES:
        raise UsageError(
            f"group {name!r} needs a head that knows detached and get_if_exists, and this one is an older version: "
            "upgrade the head first"
        )
    if not options.detached:
        return
    if options.restart.restarts:
        raise UsageError(
            f"group {name!r} cannot be detached and have a restart policy: a worker that is started again is "
            "constructed by the process that launched the group, which may have ended"
        )
    if any(spec.claims for spec in specs):
        raise UsageError(f"group {name!r} holds robots and cannot be detached: whoever moves them must be there")
    if cluster.ends_with:
        raise UsageError(f"group {name!r} cannot be detached: {cluster.ends_with}")


def _wait_until_up(runtime: Runtime, group: RemoteGroup) -> None:
    """Block until a detached group is constructed and given up: its launcher may end then."""
    try:
        group.want().wait()
    except Exception:
        raise
    except BaseException:
        if group.owned:  # else it was running already (get_if_exists)
            runtime.groups.withdraw(group)  # Ctrl-C: a group that is half up is nobody's
        raise


def check_arguments(cluster: object, strategy: object, restart: object) -> None:
    """Refuse arguments of a launch that are of another kind.

    Raises:
        UsageError: says which, and what to write.
    """
    if hasattr(cluster, "get_placement"):
        raise UsageError(
            f"launch() was given a {type(cluster).__name__} in the place of the cluster: write launch(cluster, "
            f"placement_strategy={type(cluster).__name__}(...))"
        )
    if not hasattr(cluster, "runtime"):
        raise UsageError(
            f"launch() was given {cluster!r} in the place of the cluster: write launch(cluster), where cluster is what "
            "Cluster(...) returned"
        )
    if strategy is not None and not hasattr(strategy, "get_placement"):
        raise UsageError(
            f"placement_strategy is {strategy!r}; it must be a PlacementStrategy, such as NodePlacementStrategy([0, 1])"
        )
    if restart is not None and not isinstance(restart, RestartPolicy):
        example = "RestartPolicy.on_failure()"
        if isinstance(restart, int) and not isinstance(restart, bool):
            example = f"RestartPolicy.on_failure(max_restarts={restart})" if restart else "RestartPolicy.never()"
        raise UsageError(f"restart is {restart!r}; it must be a RestartPolicy: write restart={example}")


def _check(name: str, options: Options) -> None:
    if options.start_method not in START_METHODS:
        raise UsageError(f"start_method is {options.start_method!r}; it must be one of {', '.join(START_METHODS)}")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise UsageError(f"max_concurrency is {options.max_concurrency}; it must be at least 1")
    if not options.wait_for_hardware >= 0:  # NaN too
        raise UsageError(f"wait_for_hardware is {options.wait_for_hardware}; it must be a number of seconds, 0 or more")
    if not name or any(char in name for char in "/\0\n"):
        raise UsageError(f"{name!r} cannot be a group's name: it must not be empty or hold a slash or a line break")


def _for_workers(options: Options, cluster: Cluster) -> LaunchOptions:
    """What the workers' agents need of the options, of this process and of its environment."""
    settings = Settings.load()
    preload = PRELOADED if options.preload is None else options.preload
    return LaunchOptions(
        start_method=options.start_method,
        preload=[module for module in preload if options.preload is not None or module in sys.modules],
        sys_path=import_paths(),
        cwd=_cwd(),
        env=dict(options.env),
        defaults=for_workers(),
        path_env_merge_mode=settings.path_env_merge_mode,
        net_devices=settings.comm_net_devices,
        log_dir=cluster.log_dir if options.show_logs else None,
        forward_logs=options.show_logs,
        numa_bind=options.numa_bind,
        limits=options.limits,
        restart=options.restart,
        owner_must_answer=_must_answer(options.robot_owner_must_answer, settings.robot_owner_must_answer),
    )


def _must_answer(option: bool | None, setting: bool | None) -> str:
    """Return `WorkerSpec.owner_must_answer`, from the argument of ``launch`` or else the environment."""
    chosen = setting if option is None else option
    return {None: "elsewhere", True: "always", False: ""}[chosen]


def _warn_of_robots(cls: type, specs: Sequence[WorkerSpec]) -> None:
    robots = list(dict.fromkeys(claim.title for spec in specs for claim in spec.claims))
    if robots and not _has_lease_hook(cls):
        log.warning(
            "%s has no %s(), and %s would go on with its last command when its worker loses its lease or dies: "
            "define one that stops it",
            cls.__name__, LEASE_HOOK, ", ".join(robots),
        )  # fmt: skip


def _encode(
    cls: type,
    reference: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    extras: dict[str, Any],
    copy: payload.Copy,
) -> list[Buffer]:
    try:
        return payload.encode((None if reference else cls, args, kwargs, extras), cls.__name__, copy=copy)
    except SerializationError:
        payload.encode_call(args, kwargs)  # raises with the path of the argument, if it is one
        raise


def _failure(raised: frames.Raised, parts: AuthenticatedParts, peer: Peer) -> Exception:
    return failure.decode(raised, parts, worker=peer.name, rank=peer.rank, node=peer.node)


def _has_lease_hook(cls: type) -> bool:
    """Whether the user's class, not the library, says how its robots are made safe."""
    definer = next((klass for klass in cls.__mro__ if LEASE_HOOK in vars(klass)), None)
    return definer is not None and not definer.__module__.startswith("rlinf_actors.worker.")


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed under us: the workers start in their node's
        return None


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
        check_arguments(cluster, placement_strategy, restart)
        control = launch(
            self._cls,
            self._args,
            self._kwargs,
            cluster,
            Options(
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
