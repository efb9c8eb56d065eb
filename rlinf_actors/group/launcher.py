"""GroupLauncher: what ``create_group`` returns. It starts a group and returns the handle.

`launch` runs on the caller's thread. It checks the arguments, places the workers, encodes the class with its arguments,
and has the loop thread send one Launch message to the head. Outside an event loop, `launch` waits for the head's
answer, one round trip. In an event loop it never blocks, and errors reach ``await group`` and every call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from rlinf_actors.cluster.service import import_paths, modules_to_preload, network_environment
from rlinf_actors.config_files import wrong_variable
from rlinf_actors.errors import GroupNotFoundError, NameInUseError, SerializationError, UsageError
from rlinf_actors.group import group_spec, provision
from rlinf_actors.group.class_facts import (
    LEASE_HOOK,
    OUTSIDE_HOOK,
    check_class,
    check_robot_hooks,
    defines,
    facts_of,
)
from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.group import WorkerGroup
from rlinf_actors.group.group_spec import START_METHODS, WorkerLimits, class_reference
from rlinf_actors.group.resizing import Grower, keeps
from rlinf_actors.hardware.extensions import providers
from rlinf_actors.hardware.identity import identities_of
from rlinf_actors.hardware.registry import is_exclusive
from rlinf_actors.model.hardware import HardwareInfo
from rlinf_actors.model.names import name_of_class, wrong_name
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.placement.strategies import default_strategy
from rlinf_actors.runtime.construction import Construction
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.settings import Settings, catching, for_workers
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import payload
from rlinf_actors.wire.client_messages import Launch
from rlinf_actors.wire.protocol import MAX_SIZE
from rlinf_actors.wire.values import WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.model.buffers import Buffer
    from rlinf_actors.model.placement import Placement
    from rlinf_actors.placement.strategies import PlacementStrategy
    from rlinf_actors.runtime.remote_group import RemoteGroup
    from rlinf_actors.runtime.runtime import Runtime

log = logging.getLogger(__name__)

T = TypeVar("T")


class GroupLauncher(Generic[T]):
    """A worker class with its constructor arguments, as ``create_group`` returns it; `launch` starts a group of it."""

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
        robot: bool = True,
    ) -> WorkerGroup[T]:
        """Launch a group: reserve its name, start its workers, and return the group before the workers are constructed.

        In a plain script, this blocks until the head has reserved the name. In a running event loop it does not block;
        if the launch fails, ``await group`` and every call on the group raise the error. A launch on robots
        ends, with a warning, if the group is dropped before it is up, as by the cancelled function that had it.

        Args:
            cluster: the cluster to launch on.
            placement_strategy: where the workers run; default: one per accelerator, without accelerators one on node 0.
            name: name of the group; default: ``worker_group_<Class>``.
            max_concurrency: how many calls a worker runs at a time, on threads, or as coroutines with ``async def``.
            isolate_gpu: True to let each worker see only its own accelerators.
            catch_system_failure: True to print a worker's stacks if a signal ends it; default: RLINF_CATCH_FAILURE.
            disable_distributed_log: True to keep the group's output from the terminal and ``distributed_log_dir``.
            start_method: "fork" to fork the workers from a template; "spawn" for libraries that do not survive a fork.
            preload: modules to import before the fork; default: torch and numpy if this process has imported them.
            env_vars: environment variables of this group. CUDA_VISIBLE_DEVICES etc. must name the placement's devices.
            wait_for_hardware: seconds to wait for robots that other groups use; Ctrl-C or ``shutdown()`` ends the wait.
            numa_bind: True to run workers on the CPUs and memory of their accelerators' NUMA node, if it is known.
            memory_limit: bytes, or text such as "8GiB", for each worker and its processes; the kernel kills all of
                them beyond it. Shared memory counts for the worker that wrote it, accelerator memory does not count.
            pids_limit: maximum number of processes and threads of each worker.
            limits: on a node that cannot enforce limits, "required" starts no worker, "best_effort" starts it without.
            restart: when to restart a failed worker, with the same constructor arguments. The calls that it was running
                fail, unless they were made through ``with_retries``; later calls wait. Default: never.
            robot_owner_must_answer: True to end a group with robots if this process is silent for a robot's lease.
                Default: RLINF_ACTORS_ROBOT_OWNER_MUST_ANSWER, or else True for robots on other machines.
            detached: True to let the group outlive this process. A driver's group then runs until ``shutdown()``, a
                worker's until the driver ends. A driver needs a head that outlives it, and a named namespace. A plain
                script blocks until the workers are constructed. Not allowed with robots or a restart policy.
            get_if_exists: True to return a handle of the running group with this name and class name, if there is one,
                without changing it. If two processes launch at the same time, one of them starts the group.
            robot: False to say that the group moves no robot (a policy server, a logger). A group that a robot's worker
                launches otherwise inherits its lease: it is stopped with it, and ends with it even if *detached*.

        Raises:
            NameInUseError: (a ValueError) the name is taken.
            HardwareInUseError, EmergencyStopError: a robot is held by another group, or under an emergency stop.
            UsageError, SerializationError: an argument has the wrong type or value, or cannot be pickled.
            PlacementError, ConfigError: the placement does not fit the cluster or the devices named in *env_vars*.
        """
        check_arguments(cluster, placement_strategy, restart)
        options = LaunchOptions(
            strategy=placement_strategy,
            name=name,
            max_concurrency=max_concurrency,
            isolate_accelerator=isolate_gpu,
            show_logs=not disable_distributed_log,
            start_method=start_method,
            preload=preload,
            env={**catching(catch_system_failure), **(env_vars or {})},
            wait_for_hardware=wait_for_hardware,
            numa_bind=numa_bind,
            limits=WorkerLimits.of(memory_limit, pids_limit, limits),
            restart=restart or RestartPolicy.never(),
            robot_owner_must_answer=robot_owner_must_answer,
            detached=detached,
            get_if_exists=get_if_exists,
            robot=robot,
        )
        return WorkerGroup(launch(self._cls, self._args, self._kwargs, cluster, options))


class LaunchOptions(msgspec.Struct, frozen=True):
    """The arguments of `GroupLauncher.launch` except the cluster, as the functions of this module pass them on."""

    strategy: PlacementStrategy | None = None
    name: str | None = None
    max_concurrency: int | None = None
    isolate_accelerator: bool = True
    show_logs: bool = True
    start_method: str = "fork"
    preload: Sequence[str] | None = None
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    wait_for_hardware: float = 0.0
    numa_bind: bool = False
    limits: WorkerLimits = msgspec.field(default_factory=WorkerLimits)
    restart: RestartPolicy = msgspec.field(default_factory=RestartPolicy.never)
    robot_owner_must_answer: bool | None = None
    detached: bool = False
    get_if_exists: bool = False
    robot: bool = True


def launch(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], cluster: Cluster, options: LaunchOptions
) -> GroupControl:
    """Launch a group of workers of class *cls*, and return its GroupControl.

    *args* and *kwargs* are the arguments of the constructor. Raises what `GroupLauncher.launch` raises.
    """
    name = options.name or f"worker_group_{name_of_class(cls.__name__)}"
    _check_options(name, options)
    if options.robot and cluster.runtime.inherited and options.detached:
        log.warning("group %r inherits the lease of its launcher, and so ends with it although it is detached", name)
        options = msgspec.structs.replace(options, detached=False)
    check_robot_hooks(cls)
    runtime, title = cluster.runtime, class_reference(cls) or f"{cls.__module__}:{cls.__qualname__}"
    if options.get_if_exists:
        running = _running(runtime, cluster.namespace, name)
        if running is not None:
            return _handle_of(running, cls, title, runtime)
    group, message, environs = _new_group(name, title, cls, args, kwargs, cluster, options)
    if cluster.log_dir is not None and options.show_logs:
        log.info("the job's driver writes the output of group %r to %s, as its own user", name, cluster.log_dir)
    future = runtime.io.submit(provision.launch(cluster, message, group, environs))
    if not _in_event_loop():
        try:
            # one round trip, unless code is sent; with a loop running, `await group` and every call raise instead
            AsyncWork.of_future(future, f"launch() of group {name!r}").wait()
        except BaseException:
            future.cancel()  # Ctrl-C while the launch waits for hardware withdraws it
            group.error_was_raised()
            raise
        if options.get_if_exists:  # another thread may have got the running group meanwhile
            group = runtime.groups.existing(cluster.namespace, name) or group
        if options.detached:
            _wait_until_up(runtime, group)
    if robots := ", ".join(dict.fromkeys(claim.title for spec in message.workers for claim in spec.claims)):
        group.unheld = partial(runtime.io.call, _end_unheld, runtime, future, robots)
    return GroupControl(runtime, group, facts_of(cls))


def _end_unheld(runtime: Runtime, future: concurrent.futures.Future[None], robots: str, group: RemoteGroup) -> None:
    """End a launch on *robots* that is not up, because nobody can use or end its group any more. Loop thread."""
    if group.handles or group.called or group.closing or group.ready.done() or not group.owned:
        return
    log.warning(
        "group %r, with %s, is ended, for its launch was cancelled, or its handle dropped, before it was up: keep what "
        "launch() returns until the group is up",
        group.name, robots,
    )  # fmt: skip
    future.cancel()  # it may not have been sent yet
    runtime.groups.withdraw(group)


def _new_group(
    name: str,
    title: str,
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cluster: Cluster,
    options: LaunchOptions,
) -> tuple[RemoteGroup, Launch, dict[int, provision.Environs]]:
    """Place a group, and return its RemoteGroup, which this process owns, the Launch message for the head, and what the
    environments of its workers are built from.

    Args:
        name: name of the group.
        title: ``module:qualname`` of the class, for the head.
        cls: the worker class.
        args, kwargs: arguments of its constructor.
        cluster: the cluster to launch on.
        options: the other arguments of `GroupLauncher.launch`.
    """
    runtime, strategy = cluster.runtime, options.strategy or default_strategy(cluster)
    placements = sorted(strategy.get_placement(cluster, options.isolate_accelerator), key=lambda one: one.rank)
    if len(placements) > MAX_SIZE:
        raise UsageError(f"{name!r} would have {len(placements):,} workers; a group has at most {MAX_SIZE:,}")
    template = _template(name, cls, cluster, options, Settings.load())
    specs = _specs(template, placements, cluster, options)
    _check_lifetime(name, specs, cluster, options)
    hardware = group_spec.hardware_of(placements, cluster)
    _warn_of_robots(cls, specs, [info for infos in hardware.values() for info in infos])
    nodes = [cluster.get_node_info(spec.node_rank) for spec in specs]
    modules = [type(info).__module__ for infos in hardware.values() for info in infos]
    modules += [node.accelerator_registered_by for node in nodes if node.accelerator_registered_by]
    reference = class_reference(cls)
    given = (None if reference else cls, args, kwargs, _extras(hardware, cluster, options))
    try:
        parts = payload.encode(given, cls.__name__, copy=runtime.copy)
    except SerializationError:
        payload.encode_call(args, kwargs)  # raises with the path of the argument, if an argument is the cause
        raise
    construction = Construction(
        reference,
        parts,
        options.max_concurrency or 0,
        extensions=providers(modules),
        preload=template.preload,
        again=options.restart.restarts,
        detach=options.detached,
        lost=runtime.lost,
    )
    if options.restart.restarts or keeps(parts):
        construction.growable, construction.grow = True, _grower(cls, args, kwargs, cluster, template, options)
    names = [cluster.node_name(node.node_rank) for node in nodes]
    ids = [spec.id for spec in specs]
    group = runtime.groups.new(cluster.namespace, name, names, construction, ids, options.wait_for_hardware)
    detail = group_spec.detail_of(placements, nodes, names, hardware, options.restart.restarts)
    group.detail = group_spec.encode(detail)  # for an attach() in this process before the head has answered
    group.cls = title
    group.closes = "_close" in facts_of(cls).private
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
    labels = {placement.rank: placement.node_group_label for placement in placements}
    return group, message, provision.environs_of(specs, labels, cluster)


def _specs(
    template: WorkerSpec, placements: Sequence[Placement], cluster: Cluster, options: LaunchOptions
) -> list[WorkerSpec]:
    """Return the WorkerSpecs of a group's workers, with the emulated network and the profiler of the configuration."""
    config, net_devices = cluster.config, Settings.load().comm_net_devices
    emulation = network_environment(cluster, template.group, len(placements))
    defaults = {**for_workers(), **emulation}
    specs = group_spec.worker_specs(template, placements, cluster, defaults, net_devices, options.numa_bind)
    if options.robot and cluster.runtime.inherited:
        for i, spec in enumerate(specs):  # the launcher's claims also in place of its own on that robot
            claims = {claim.key: claim for claim in (*spec.claims, *cluster.runtime.inherited)}
            specs[i] = msgspec.structs.replace(spec, claims=tuple(claims.values()))
    return group_spec.under_profiler(specs, config.profiling if config else None)


def _extras(hardware: Mapping[int, Any], cluster: Cluster, options: LaunchOptions) -> dict[str, Any]:
    """Return what is sent along with the class; see WorkerContext.extras."""
    infos = cluster.runtime.hardware_infos if options.robot and cluster.runtime.inherited else []
    return {"hardware_infos": hardware, "inherited_infos": infos, **cluster.extras()}


def _grower(
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cluster: Cluster,
    template: WorkerSpec,
    options: LaunchOptions,
) -> Grower:
    """Return what this process keeps of a launch, so that ranks can be added to the group."""

    def specs(placements: Sequence[Placement]) -> list[WorkerSpec]:
        return _specs(template, placements, cluster, options)

    def encode(hardware: Mapping[int, Any]) -> Sequence[Buffer]:
        given = (None if class_reference(cls) else cls, args, kwargs, _extras(hardware, cluster, options))
        return payload.encode(given, cls.__name__, copy=cluster.runtime.copy)

    async def prepare(specs: list[WorkerSpec], placements: Sequence[Placement]) -> list[WorkerSpec]:
        labels = {placement.rank: placement.node_group_label for placement in placements}
        environs = provision.environs_of(specs, labels, cluster)
        if cluster.code_source is None and not environs:
            return specs
        message = Launch(cluster.namespace, template.group, "", specs)
        return (await provision.provisioner(cluster).prepare(message, environs)).workers

    return Grower(cluster, options.isolate_accelerator, specs, encode, prepare, options.restart.restarts)


def _running(runtime: Runtime, namespace: str, name: str) -> RemoteGroup | None:
    """Return the RemoteGroup of the running group of this name if this process has a handle of it, else None.

    If the handle came from another process and was never used, the group may have ended, so the head is asked. In a
    running event loop, which must not block, the group is returned unchecked, and its first use asks the head.
    """
    while (group := runtime.groups.existing(namespace, name)) is not None:
        if group.found or group.owned or _in_event_loop():
            return group
        with contextlib.suppress(GroupNotFoundError):
            AsyncWork.of(runtime.io, runtime.groups.reach(group), f"the search for group {group.name!r}").wait()
    return None


def _handle_of(group: RemoteGroup, cls: type, title: str, runtime: Runtime) -> GroupControl:
    """Return a GroupControl of the running group *group*, for a launch with get_if_exists.

    *title* is ``module:qualname`` of *cls*. Raises NameInUseError if the class of the group has another name.
    """
    if group.cls and group.cls.rpartition(":")[2] != title.rpartition(":")[2]:
        raise NameInUseError(
            f"the group named {group.name!r} in job {group.namespace!r} is of class {group.cls}, and not of "
            f"{title}: give this one another name, or shut that one down first"
        )
    return GroupControl(runtime, group, facts_of(cls))


def _check_lifetime(name: str, specs: Sequence[WorkerSpec], cluster: Cluster, options: LaunchOptions) -> None:
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
    """Block until all workers of a detached group are constructed, so that the launching script may end afterwards.

    If the wait is interrupted, as by Ctrl-C, stop the group.
    """
    try:
        group.request_ready().wait()
    except Exception:
        raise
    except BaseException:
        if group.owned:  # else the group was running already (get_if_exists)
            runtime.groups.withdraw(group)  # Ctrl-C: a group that is half up would have no owner
        raise


def check_arguments(cluster: object, strategy: object, restart: object) -> None:
    """Raise UsageError if one of these arguments of `launch` has a wrong type; the message says what to write."""
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


def _check_options(name: str, options: LaunchOptions) -> None:
    if options.start_method not in START_METHODS:
        raise UsageError(f"start_method is {options.start_method!r}; it must be one of {', '.join(START_METHODS)}")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise UsageError(f"max_concurrency is {options.max_concurrency}; it must be at least 1")
    if not options.wait_for_hardware >= 0:  # NaN too
        raise UsageError(f"wait_for_hardware is {options.wait_for_hardware}; it must be a number of seconds, 0 or more")
    for wrong in (wrong_name(name, "a group"), *map(wrong_variable, options.env, options.env.values())):
        if wrong:
            raise UsageError(wrong)


def _template(name: str, cls: type, cluster: Cluster, options: LaunchOptions, settings: Settings) -> WorkerSpec:
    """Return a WorkerSpec with the fields that all workers of the group share, such as options and import paths."""
    must_answer = options.robot_owner_must_answer
    if must_answer is None:
        must_answer = settings.robot_owner_must_answer
    preload = options.preload
    if preload is None:
        preload = modules_to_preload()
    return WorkerSpec(
        "", name, cluster.namespace, -1, 0, -1, dict(options.env),
        start_method=options.start_method,
        preload=tuple(preload),
        sys_path=tuple(import_paths()),
        cwd=_cwd(),
        path_env_merge_mode=settings.path_env_merge_mode,
        forward_logs=options.show_logs,
        keep_logs=options.show_logs and cluster.log_dir is not None,
        memory_limit=options.limits.memory,
        pids_limit=options.limits.pids,
        limits_best_effort=options.limits.best_effort,
        restart=options.restart if options.restart.restarts else None,
        trace_events=recorder.for_workers(),
        owner_must_answer={None: "elsewhere", True: "always", False: ""}[must_answer],
        stops_outside=defines(cls, OUTSIDE_HOOK),
    )  # fmt: skip


def _warn_of_robots(cls: type, specs: Sequence[WorkerSpec], hardware: Sequence[HardwareInfo]) -> None:
    """Log a warning for each type whose robots have no identity, and if no method of the user's class stops them."""
    for kind in dict.fromkeys(info.type for info in hardware if is_exclusive(info.type) and not identities_of(info)):
        log.warning(
            "type %s does not say which robot is which, so all of a node count as one, which one group has at a time. "
            "To tell them apart, set `identities` in enumerate() (docs/how-to/add-hardware.md)", kind,
        )  # fmt: skip
    robots = list(dict.fromkeys(claim.title for spec in specs for claim in spec.claims))
    if not robots and (hook := next((name for name in (LEASE_HOOK, OUTSIDE_HOOK) if defines(cls, name)), "")):
        log.warning(
            "%s has %s(), which never runs: group %r is placed on no robot, and no robot's worker launches it. Nothing "
            "stops what it moves",
            cls.__name__, hook, specs[0].group,
        )  # fmt: skip
    if robots and not defines(cls, LEASE_HOOK) and not defines(cls, OUTSIDE_HOOK):
        log.warning(
            "%s has neither %s(hardware_infos) nor %s(), and %s would go on with its last command when its worker "
            "loses its lease or dies: define one that stops it",
            cls.__name__, OUTSIDE_HOOK, LEASE_HOOK, ", ".join(robots),
        )  # fmt: skip


def _in_event_loop() -> bool:
    return asyncio._get_running_loop() is not None


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the directory was removed: the workers start in their node's
        return None
