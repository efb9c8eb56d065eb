"""What each public name does in a running event loop: the rows of test_event_loops.py and loop_workers.py.

A new public method needs a row here (test_exports.py says which are missing): in ROWS or WORKER, or with a reason in
INSTEAD or NOT_CALLED. A row is a function of the scene. What it returns
is awaited if it can be; with the head stopped, a row in WAITS does not end and the event loop goes on meanwhile.
"""

from __future__ import annotations

import contextlib
from typing import Any

from rlinf_actors import (
    AsyncWork,
    Channel,
    Cluster,
    ClusterEnvVar,
    ComponentPlacement,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PathEnvMergeMode,
    PlacementStrategy,
    StridedPlacementStrategy,
    Worker,
    WorkerAddress,
    WorkerGroup,
    WorkerGroupFuncResult,
)
from rlinf_actors.channel.results import Take
from rlinf_actors.cluster.connect import Connecting
from rlinf_actors.cluster.event_stream import EventStream
from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.group import GroupView
from rlinf_actors.group.launcher import GroupLauncher
from rlinf_actors.group.stream import StreamResult
from rlinf_actors.testing import LocalCluster
from rlinf_actors.worker.device_lock import DeviceLock
from rlinf_actors.worker.leasepage import LeasePage
from rlinf_actors.worker.manager_proxy import ManagerProxy

CLASSES: tuple[type, ...] = (
    AsyncWork, Channel, Cluster, ComponentPlacement, Connecting, DeviceLock, EventStream, FlexiblePlacementStrategy,
    GroupControl, GroupLauncher, GroupView, LeasePage, LocalCluster, ManagerProxy, NodePlacementStrategy,
    PackedPlacementStrategy, PlacementStrategy, StreamResult, StridedPlacementStrategy, Take, Worker, WorkerGroup,
    WorkerGroupFuncResult,
)  # fmt: skip
FAR = WorkerAddress("far", 0)
AWAITED = {"__await__", "__aenter__", "__aexit__", "__aiter__", "__anext__"}
BLOCKING = {"__enter__", "__exit__", "__iter__", "__next__"}

ROWS: dict[str, Any] = {
    # --- a Cluster ---
    "Cluster.accelerator_ranks": lambda s: s.cluster.accelerator_ranks,
    "Cluster.allocate": lambda s: s.cluster.allocate(s.cls, "allocated", 1),
    "Cluster.connect": lambda s: s.local.connect(),
    "Cluster.current": lambda s: Cluster.current(),
    "Cluster.ends_with": lambda s: s.cluster.ends_with,
    "Cluster.events": lambda s: s.cluster.events(),
    "Cluster.extras": lambda s: s.cluster.extras(),
    "Cluster.find_free_port": lambda s: s.cluster.find_free_port(),
    "Cluster.get_alive_nodes": lambda s: s.cluster.get_alive_nodes(async_op=True),
    "Cluster.get_full_env_var_name": lambda s: Cluster.get_full_env_var_name(ClusterEnvVar.LOG_LEVEL),
    "Cluster.get_node_group": lambda s: s.cluster.get_node_group(),
    "Cluster.get_node_info": lambda s: s.cluster.get_node_info(0),
    "Cluster.get_node_ip": lambda s: s.cluster.get_node_ip(0),
    "Cluster.get_path_env_merge_mode": lambda s: Cluster.get_path_env_merge_mode({}),
    "Cluster.get_profiling_env_vars_for_worker": lambda s: Cluster.get_profiling_env_vars_for_worker("a:0", None),
    "Cluster.get_sys_env_var": lambda s: Cluster.get_sys_env_var(ClusterEnvVar.LOG_LEVEL),
    "Cluster.has_initialized": lambda s: Cluster.has_initialized(),
    "Cluster.here": lambda s: s.cluster.here(),
    "Cluster.merge_worker_env_vars": lambda s: Cluster.merge_worker_env_vars({}, {}, PathEnvMergeMode.APPEND),
    "Cluster.modify_profile_context": lambda s: Cluster.modify_profile_context("python", "a:0", None),
    "Cluster.node_name": lambda s: s.cluster.node_name(0),
    "Cluster.num_accelerators": lambda s: s.cluster.num_accelerators,
    "Cluster.num_nodes": lambda s: s.cluster.num_nodes,
    "EventStream.__aiter__": lambda s: s.cluster.events().__aiter__(),
    "EventStream.__anext__": lambda s: s.cluster.events().__anext__(),
    # --- placements ---
    "ComponentPlacement.components": lambda s: s.placement.components,
    "ComponentPlacement.get_hardware_ranks": lambda s: s.placement.get_hardware_ranks("actor"),
    "ComponentPlacement.get_rule": lambda s: s.placement.get_rule("actor"),
    "ComponentPlacement.get_strategy": lambda s: s.placement.get_strategy("actor"),
    "ComponentPlacement.get_world_size": lambda s: s.placement.get_world_size("actor"),
    "ComponentPlacement.placement_mode": lambda s: s.placement.placement_mode,
    "FlexiblePlacementStrategy.get_placement": lambda s: FlexiblePlacementStrategy([[0]]).get_placement(s.cluster),
    "NodePlacementStrategy.get_placement": lambda s: NodePlacementStrategy([0, 1]).get_placement(s.cluster),
    "PackedPlacementStrategy.get_placement": lambda s: PackedPlacementStrategy(0, 1).get_placement(s.cluster),
    "PlacementStrategy.get_placement": lambda s: PlacementStrategy.get_placement,
    "StridedPlacementStrategy.get_placement": lambda s: StridedPlacementStrategy(0, 1, 1, 1).get_placement(s.cluster),
    # --- groups ---
    "GroupLauncher.launch": lambda s: s.cls.create_group().launch(s.cluster, NodePlacementStrategy([1]), name="new"),
    "WorkerGroup.__await__": lambda s: s.group,
    "WorkerGroup.call": lambda s: s.group.call(s.cls.add, 1),
    "WorkerGroup.method": lambda s: s.group.method(s.cls.add)(1),
    "WorkerGroup.control": lambda s: s.group.control,
    "WorkerGroup.execute_on": lambda s: s.group.execute_on(0).add(1),
    "WorkerGroup.from_address": lambda s: WorkerGroup.from_address(s.cls, FAR, async_op=True),
    "WorkerGroup.from_group_name": lambda s: WorkerGroup.from_group_name(s.cls, "far", async_op=True),
    "WorkerGroup.on_node": lambda s: s.group.on_node(0).add(1),
    "WorkerGroup.placements": lambda s: s.group.placements,
    "WorkerGroup.add_ranks": lambda s: s.group.add_ranks(NodePlacementStrategy([1])),
    "WorkerGroup.with_retries": lambda s: s.group.with_retries(1).add(1),
    "WorkerGroup.with_timeout": lambda s: s.group.with_timeout(60).add(1),
    "WorkerGroup.worker_cls_name": lambda s: s.group.worker_cls_name,
    "WorkerGroup.worker_group_name": lambda s: s.group.worker_group_name,
    "WorkerGroup.worker_info_list": lambda s: s.group.worker_info_list,
    "WorkerGroup.world_size": lambda s: s.group.world_size,
    "GroupView.call": lambda s: s.group.execute_on(0).call(s.cls.add, 1),
    "GroupView.method": lambda s: s.group.execute_on(0).method(s.cls.add)(1),
    "GroupView.execute_on": lambda s: s.group.execute_on(0, 1).execute_on(1).add(1),
    "GroupView.on_node": lambda s: s.group.execute_on(0).on_node(0).add(1),
    "GroupView.with_retries": lambda s: s.group.execute_on(0).with_retries(1).add(1),
    "GroupView.with_timeout": lambda s: s.group.execute_on(0).with_timeout(60).add(1),
    "GroupControl.call": lambda s: s.group.control.call(s.cls.add, 1),
    "GroupControl.control": lambda s: s.group.control.control,
    "GroupControl.from_address": lambda s: s.group.control.from_address(s.cls, FAR, async_op=True),
    "GroupControl.on_node": lambda s: s.group.control.on_node(0).add(1),
    "GroupControl.node_ranks": lambda s: s.group.control.node_ranks,
    "GroupControl.with_retries": lambda s: s.group.control.with_retries(1).add(1),
    "GroupControl.with_timeout": lambda s: s.group.control.with_timeout(60).add(1),
    "GroupControl.method": lambda s: s.group.control.method(s.cls.add)(1),
    "GroupControl.name_of": lambda s: s.group.control.name_of(s.cls.add),
    "GroupControl.hardware": lambda s: s.group.control.hardware,
    "GroupControl.models": lambda s: s.group.control.models,
    "GroupControl.placements": lambda s: s.group.control.placements,
    "GroupControl.restarts": lambda s: s.group.control.restarts,
    "GroupControl.states": lambda s: s.group.control.states(),
    "GroupControl.worker_infos": lambda s: s.group.control.worker_infos(),
    "GroupControl.world_size": lambda s: s.group.control.world_size,
    # --- results and streams ---
    "WorkerGroupFuncResult.__await__": lambda s: s.group.add(bytes(1 << 20)),  # by shared memory
    "WorkerGroupFuncResult.as_completed": lambda s: _all(s.group.add(1).as_completed()),
    "WorkerGroupFuncResult.async_wait": lambda s: s.group.add(1).async_wait(),
    "WorkerGroupFuncResult.attempts": lambda s: s.result.attempts,
    "WorkerGroupFuncResult.cancel": lambda s: s.group.add(1).cancel(),
    "WorkerGroupFuncResult.cancelled": lambda s: s.result.cancelled(),
    "WorkerGroupFuncResult.cause": lambda s: s.result.cause,
    "WorkerGroupFuncResult.consume_duration": lambda s: s.group.add(1).consume_duration(async_op=True),
    "WorkerGroupFuncResult.consume_durations": lambda s: s.group.add(1).consume_durations(async_op=True),
    "WorkerGroupFuncResult.done": lambda s: s.result.done(),
    "WorkerGroupFuncResult.exception": lambda s: s.result.exception(),
    "StreamResult.__aiter__": lambda s: _all(s.group.count(40)),
    "a stream that is left and dropped": lambda s: _first(s.group.count(40)),
    "StreamResult.aclose": lambda s: s.group.count(40).aclose(),
    "StreamResult.close": lambda s: s.group.count(40).close(),
    # --- channels; test_channels_nothing_blocks.py has what they answer ---
    "Channel.create": lambda s: Channel.create("new", async_op=True),
    "Channel.is_local": lambda s: s.channel.is_local,
    "Channel.connect": lambda s: Channel.connect("theirs-too", async_op=True),
    "Channel.put": lambda s: s.channel.put(1, async_op=True),
    "Channel.put_nowait": lambda s: s.channel.put_nowait(2, async_op=True),
    "Channel.get": lambda s: s.channel.get(async_op=True),
    "Channel.get_nowait": lambda s: s.channel.get_nowait(async_op=True),
    "Channel.get_batch": lambda s: s.channel.get_batch(0, async_op=True),
    "Channel.take": lambda s: _taken(s.channel, "first"),
    "Take.__aenter__": lambda s: _taken(s.channel, "second"),
    "Channel.describe": lambda s: s.channel.describe(async_op=True),
    "Channel.empty": lambda s: s.channel.empty(async_op=True),
    "Channel.full": lambda s: s.channel.full(async_op=True),
    "Channel.qsize": lambda s: s.channel.qsize(async_op=True),
    "Channel.undeliverable": lambda s: s.channel.undeliverable(async_op=True),
    "Channel.maxsize": lambda s: s.channel.maxsize,
    "Channel.name": lambda s: s.channel.name,
    "Channel.close": lambda s: s.ended.close(async_op=True),
    "Channel.__aiter__": lambda s: _all(s.ended),
    # --- works ---
    "AsyncWork.__await__": lambda s: s.work(),
    "AsyncWork.async_wait": lambda s: s.work().async_wait(),
    "AsyncWork.done": lambda s: s.work().done(),
    "AsyncWork.error": lambda s: s.work().error,
    "AsyncWork.get_last_work": lambda s: s.work().get_last_work(),
    "AsyncWork.get_next_work": lambda s: s.work().get_next_work(),
    "AsyncWork.made_of": lambda s: AsyncWork.made_of(s.work(), repr, "a row"),
    "AsyncWork.of": lambda s: AsyncWork.of(s.cluster.runtime.io, s.cls._nothing(), "a row"),
    "AsyncWork.of_future": lambda s: AsyncWork.of_future(s.cluster.runtime.io.submit(s.cls._nothing()), "a row"),
    "AsyncWork.on_thread": lambda s: s.work(),
    "AsyncWork.reject": lambda s: AsyncWork("a row").resolve(1),
    "AsyncWork.resolve": lambda s: AsyncWork("a row").resolve(1),
    "AsyncWork.then": lambda s: s.work().then(int),
}
"""In the driver, with the head stopped, in this order."""

ENDS: dict[str, Any] = {
    "WorkerGroup.shutdown": lambda s: s.groups.pop().shutdown(),
    "WorkerGroup.__aenter__": lambda s: s.groups[-1].__aenter__(),
    "WorkerGroup.__aexit__": lambda s: s.groups.pop().__aexit__(None, None, None),
    "GroupControl.shutdown": lambda s: s.groups.pop().control.shutdown(async_op=True),
    "GroupControl.shutdown_async": lambda s: s.groups.pop().control.shutdown_async(),
    "Cluster.__aenter__": lambda s: s.cluster.__aenter__(),
    "Cluster.shutdown": lambda s: s.cluster.shutdown(async_op=True),
    "Cluster.shutdown_async": lambda s: s.cluster.shutdown_async(),
    "Cluster.__aexit__": lambda s: s.cluster.__aexit__(None, None, None),
    "Connecting.__aexit__": lambda s: s.connecting.__aexit__(None, None, None),
}
"""The same, at the end: all of them end although the head stays stopped."""

LOCAL: dict[str, Any] = {
    "LocalCluster.start": lambda s: s.local.start(async_op=True),
    "LocalCluster.driver_env": lambda s: s.local.driver_env,
    "LocalCluster.connect": lambda s: s.local.connect(),
    "LocalCluster.stop_node": lambda s: s.local.stop_node(1, async_op=True),
    "LocalCluster.restart_agent": lambda s: s.local.restart_agent(1, async_op=True),
    "LocalCluster.kill_agent": lambda s: s.local.kill_agent(1, async_op=True),
    "LocalCluster.kill_node": lambda s: s.local.kill_node(1, async_op=True),
    "LocalCluster.stop": lambda s: s.local.stop(async_op=True),
    "LocalCluster.__aenter__": lambda s: s.other.__aenter__(),
    "LocalCluster.__aexit__": lambda s: s.other.__aexit__(None, None, None),
}
"""Of the helper for tests, one after the other."""

WORKER: dict[str, Any] = {
    "ManagerProxy.get_worker_info": lambda w: w.manager_proxy.get_worker_info(FAR, async_op=True),  # connects
    "ManagerProxy.is_alive": lambda w: w.manager_proxy.is_alive("far:0", async_op=True),
    "Worker.check_worker_alive": lambda w: w.check_worker_alive("far:0", async_op=True),
    "in a worker: Cluster.connect": lambda w: Cluster.connect(),
    "in a worker: WorkerGroup.from_group_name": lambda w: WorkerGroup.from_group_name(type(w), "far", async_op=True),
    "in a worker: a handle that was an argument": lambda w: w.far.add(1),
    "Worker.send": lambda w: w.send(bytes(1 << 20), w._group_name, 1, async_op=True),
    "Worker.recv": lambda w: w.recv(w._group_name, 1, async_op=True),
    "Worker.broadcast": lambda w: w.broadcast(b"all", async_op=True),
    "Worker.send_to": lambda w: w.send_to(w._group_name, None, [1] * w._world_size, enable_p2p=True, async_op=True),
    "Worker.recv_from": lambda w: w.recv_from(w._group_name, None, enable_p2p=True, async_op=True),
    "DeviceLock.__aenter__": lambda w: w.device_lock.__aenter__(),  # the agentd of this node is stopped too
    "DeviceLock.acquire_async": lambda w: w.device_lock.acquire_async(),
    "DeviceLock.locked": lambda w: w.device_lock.locked(),
    "LeasePage.deadline_ns": lambda w: w.lease_page.deadline_ns,
    "LeasePage.held": lambda w: w.lease_page.held(),
    "LeasePage.include_dir": lambda w: w.lease_page.include_dir,
    "Worker.accelerator_type": lambda w: type(w).accelerator_type,
    "Worker.acquire_free_port": lambda w: w.ports.append(w.acquire_free_port()),
    "Worker.release_free_port": lambda w: w.release_free_port(w.ports.pop()),
    "Worker.create_group": lambda w: type(w).create_group(),
    "Worker.current_worker": lambda w: type(w).current_worker,
    "Worker.device_lock": lambda w: w.device_lock,
    "Worker.get_name": lambda w: w.get_name(),
    "Worker.hardware_infos": lambda w: w.hardware_infos,
    "Worker.hardware_type": lambda w: w.hardware_type,
    "Worker.has_accelerator": lambda w: w.has_accelerator,
    "Worker.keep_for_stop": lambda w: w.keep_for_stop(1),
    "Worker.lease_page": lambda w: w.lease_page,
    "Worker.log_debug": lambda w: w.log_debug("a line"),
    "Worker.log_error": lambda w: w.log_error("a line"),
    "Worker.log_info": lambda w: w.log_info("a line"),
    "Worker.log_on_first_rank": lambda w: w.log_on_first_rank("a line"),
    "Worker.log_on_last_rank": lambda w: w.log_on_last_rank("a line"),
    "Worker.log_warning": lambda w: w.log_warning("a line"),
    "Worker.logger": lambda w: type(w).logger,
    "Worker.manager_proxy": lambda w: w.manager_proxy,
    "Worker.pop_execution_times": lambda w: w.pop_execution_times(),
    "Worker.worker_timer": lambda w: w.worker_timer("row").__enter__(),
    "Worker.restart_count": lambda w: w.restart_count,
    "Worker.start_profile": lambda w: w.start_profile(1),
    "Worker.stop_profile": lambda w: w.stop_profile(),
    "Worker.torch_device_type": lambda w: type(w).torch_device_type,
    "Worker.worker_address": lambda w: w.worker_address,
    "Worker.worker_info": lambda w: w.worker_info,
}
"""In an async worker on the head's node, with the head stopped."""
AFTER: dict[str, Any] = {
    "DeviceLock.__aexit__": lambda w: w.device_lock.__aexit__(None, None, None),
    "DeviceLock.release": lambda w: w.device_lock.release(),
}
"""There, when the head goes on."""
TENSORS: dict[str, Any] = {
    "Worker.send_tensor": lambda w: w.send_tensor(w.tensor, w._group_name, 1, async_op=True),
    "Worker.recv_tensor": lambda w: w.recv_tensor(w.tensor, w._group_name, 1, async_op=True),
}
"""As WORKER, where torch is installed."""

WAITS = {
    "Channel.connect", "Channel.create",
    "Cluster.allocate", "Cluster.get_alive_nodes", "EventStream.__anext__", "GroupLauncher.launch",
    "WorkerGroup.add_ranks",
    "WorkerGroup.from_address", "GroupControl.from_address", "WorkerGroup.from_group_name",
    "ManagerProxy.get_worker_info", "ManagerProxy.is_alive", "Worker.check_worker_alive",
    "in a worker: Cluster.connect", "in a worker: WorkerGroup.from_group_name",
    "in a worker: a handle that was an argument", "Worker.recv", "Worker.recv_tensor", "Worker.recv_from",
    "DeviceLock.__aenter__", "DeviceLock.acquire_async",
}  # fmt: skip
"""Rows that cannot end before the head goes on."""
MAY_WAIT = {
    "Channel.close", "Channel.__aiter__", "Worker.send", "Worker.broadcast", "Worker.send_tensor", "Worker.send_to",
}  # fmt: skip
"""Rows that may end before the head goes on, or the other end of the channel or message is there, or not."""

INSTEAD = {
    "AsyncWork.wait": "await the work",
    "DeviceLock.acquire": "acquire_async(), async with",
    "GroupControl.shutdown_blocking": "shutdown(async_op=True)",
    "GroupControl.wait_ready": "await the group",
    "LocalCluster.cluster": "connect()",
    "WorkerGroup.wait_ready": "await the group",
    "WorkerGroupFuncResult.wait": "await the result",
}
"""What blocks in any case, and what is written in an event loop."""

NOT_CALLED = {
    "AsyncWork.options": "an attribute",
    "Connecting.__await__": "tested before there is a Cluster",
    "Connecting.__aenter__": "tested before there is a Cluster",
    "Cluster.DEFAULT_SYS_ENV_VAR": "a constant",
    "Cluster.collect_trace": "needs a traced job: test_trace.py awaits it",
    "Cluster.NAMESPACE": "a constant",
    "Cluster.NamespaceConflictError": "a class",
    "Cluster.PATH_LIKE_ENV_VARS": "a constant",
    "Cluster.SYS_NAME": "a constant",
    "Cluster.TIMEOUT_WARN_TIME": "a constant",
    "DeviceLock.busy": "for the I/O thread",
    "DeviceLock.granted": "for the I/O thread",
    "Worker.concurrent": "marks a method",
    "Channel.DEFAULT_KEY": "a constant",
    "Take.__aexit__": "with __aenter__",
    "Take.deliveries": "with __aenter__",
    "Worker.connect_channel": "as Channel.connect; test_channels_nothing_blocks.py",
    "Worker.create_channel": "as Channel.create; test_channels_nothing_blocks.py",
    "Worker.batch_router": "an attribute that the user sets",
    "Worker.get_parent_rank": "an attribute of the address",
    "Worker.idempotent": "marks a method",
    "Worker.on_lease_lost": "the user's",
    "Worker.on_restart": "the user's",
    "Worker.on_world_size_changed": "the user's",
    "Worker.stop_hardware": "the user's",
    "WorkerGroup.remove_ranks": "as add_ranks, which is under way",
    "GroupControl.add_ranks": "as WorkerGroup.add_ranks",
    "GroupControl.remove_ranks": "as WorkerGroup.add_ranks",
    "Worker.pop_execution_time": "as pop_execution_times",
    "Worker.timer": "marks a method",
    "Worker.torch_platform": "imports torch",
    "WorkerGroupFuncResult.describe": "for the log",
    "WorkerGroupFuncResult.loop": "for the log",
    "WorkerGroupFuncResult.raised": "for the log",
    "WorkerGroupFuncResult.shared": "for the log",
}
"""Names without a row, and why."""


def missing() -> set[str]:
    """Public names without a row."""
    public = {
        f"{cls.__name__}.{name}"
        for cls in CLASSES
        for name in dir(cls)
        if name not in BLOCKING and (not name.startswith("_") or name in AWAITED)
    }
    return public - {*ROWS, *ENDS, *LOCAL, *WORKER, *AFTER, *TENSORS, *INSTEAD, *NOT_CALLED}


async def _first(stream: Any) -> Any:
    async for item in stream:
        return item
    raise AssertionError("the stream is empty")


async def _taken(channel: Any, key: str) -> int:
    """Put an item and take it; both exits of the block."""
    await channel.put("item", key=key, async_op=True)
    with contextlib.suppress(ArithmeticError):
        async with channel.take(key):
            raise ArithmeticError
    async with (take := channel.take(key)):
        return take.deliveries


async def _all(items: Any) -> list[Any]:
    return [item async for item in items]
