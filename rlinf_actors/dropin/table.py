"""Every module of `rlinf.scheduler`, its names, and where rlinf_actors has each of them.

Only data. The import finder (rlinf_actors.dropin.finder) makes modules from these tables, and the reference page of the
names is made from them.

To add a name: write its place here, then run ``python -m tests.reference_pages``.

`MODULES` has the modules that define names: for each name the place of its counterpart, ``module:name`` below
rlinf_actors, or an `Absent` that says why there is none and what to do. A counterpart that exists only for programs
written for RLinf is in a module of rlinf_actors.dropin. `PACKAGES` has the packages, and for each the names that it
exports, by the module of `MODULES` that defines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Absent:
    """A name of rlinf.scheduler without a counterpart.

    Attributes:
        text: why, and what to do instead; the error for the name says it.
        importable: True if the name can be imported, and raises UsageError when it is used. So a file that imports the
            name, and seldom uses it, can be loaded.
    """

    text: str
    importable: bool = False


INTERNAL = Absent(
    "it is a part of how RLinf's scheduler works on Ray, and rlinf_actors works without it", importable=True
)

CHECKOUT = ("dynamic_scheduler",)
"""Packages that are loaded from RLinf's checkout as they are: they use only public names of the scheduler."""

MODULES: Mapping[str, Mapping[str, str | Absent]] = {
    "channel.channel": {
        "DEFAULT_KEY": "channel.key_encoding:DEFAULT_KEY",
        "Channel": "channel.channel:Channel",
    },
    "channel.channel_worker": {
        "WeightedItem": "channel.assembled:WeightedItem",
        "PeekQueue": INTERNAL,
        "LocalChannel": "channel.local:LocalChannel",
        "ChannelWorker": "worker.channel_worker:ChannelWorker",
    },
    "cluster.cluster": {
        "ClusterEnvVar": "cluster.cluster_names:ClusterEnvVar",
        "PathEnvMergeMode": "cluster.cluster_names:PathEnvMergeMode",
        "Cluster": "cluster.cluster:Cluster",
    },
    "cluster.config": {
        "NodeGroupEnvConfig": "model.node:NodeEnvConfig",
        "NodeGroupConfig": "config.cluster_config:NodeGroupConfig",
        "ClusterConfig": "config.cluster_config:ClusterConfig",
    },
    "cluster.node": {
        "NodeInfo": "model.node:NodeInfo",
        "NodeGroupInfo": "model.node:NodeGroupInfo",
        "NodeProbe": INTERNAL,
    },
    "cluster.utils": {
        "TensorFieldValue": INTERNAL,
        "DataclassTensorFieldsMetadata": INTERNAL,
        "without_http_proxies": INTERNAL,
        "load_user_extension_module": "dropin.extension_module:load_user_extension_module",
        "DistributedRayLogCollector": INTERNAL,
        "DataclassProtocol": INTERNAL,
        "parse_rank_config": INTERNAL,
        "dataclass_arg_check": INTERNAL,
        "extract_dataclass_tensor_fields": INTERNAL,
        "unflatten_dataclass_tensor_fields": INTERNAL,
    },
    "collective.async_work": {
        "AsyncWork": "runtime.future:AsyncWork",
        "AsyncFuncWork": "runtime.future:ChainedWork",
        "AsyncCollWork": "runtime.future:AsyncWork",
        "AsyncChannelWork": "runtime.future:AsyncWork",
        "AsyncChannelCommWork": "runtime.future:AsyncWork",
        "AsyncRayWork": "runtime.future:AsyncWork",
        "AsyncRouteWork": "runtime.route_work:AsyncRouteWork",
    },
    "collective.collective": {
        "Collective": INTERNAL,
    },
    "collective.collective_group": {
        "TensorData": INTERNAL,
        "CollectiveGroupOptions": "messaging.process_groups:CollectiveGroupOptions",
        "CollectiveWorkQueue": INTERNAL,
        "CollectiveGroup": INTERNAL,
    },
    "collective.multi_channel_pg": {
        "MultiChannelProcessGroup": INTERNAL,
    },
    "hardware.accelerators.accelerator": {
        "ProfileConfig": "config.profiling_config:ProfileConfig",
        "AcceleratorType": "model.hardware:AcceleratorType",
        "AcceleratorManager": "dropin.accelerator_managers:AcceleratorManager",
        "Accelerator": "hardware.accelerators:Accelerator",
        "AcceleratorUtil": "hardware.accelerators:AcceleratorUtil",
    },
    "hardware.accelerators.amd_gpu": {
        "RocprofSysConfig": "config.profiling_config:RocprofSysConfig",
        "AMDGPUManager": "dropin.accelerator_managers:AMDGPUManager",
    },
    "hardware.accelerators.ascend_npu": {
        "AscendNPUProfileConfig": "config.profiling_config:ProfileConfig",
        "AscendNPUManager": "dropin.accelerator_managers:AscendNPUManager",
    },
    "hardware.accelerators.intel_gpu": {
        "IntelGPUProfileConfig": "config.profiling_config:ProfileConfig",
        "IntelGPUManager": "dropin.accelerator_managers:IntelGPUManager",
    },
    "hardware.accelerators.kunlun_xpu": {
        "KunlunXPUManager": "dropin.accelerator_managers:KunlunXPUManager",
    },
    "hardware.accelerators.musa_gpu": {
        "MUSAGPUProfileConfig": "config.profiling_config:ProfileConfig",
        "MUSAGPUManager": "dropin.accelerator_managers:MUSAGPUManager",
    },
    "hardware.accelerators.nvidia_gpu": {
        "EGL_DEVICE_ID_ENV_VARS": "dropin.nvidia_gpu:EGL_DEVICE_ID_ENV_VARS",
        "_query_egl_index_by_cuda_ordinal": "dropin.nvidia_gpu:_query_egl_index_by_cuda_ordinal",
        "_egl_index_by_cuda_device": "dropin.nvidia_gpu:_egl_index_by_cuda_device",
        "_renders_with_egl": "dropin.nvidia_gpu:_renders_with_egl",
        "_nv_profiling_active": "dropin.nvidia_gpu:_nv_profiling_active",
        "_torch_needs_avoid_record_streams": "dropin.nvidia_gpu:_torch_needs_avoid_record_streams",
        "NsightConfig": "config.profiling_config:NsightConfig",
        "NvidiaGPUManager": "dropin.nvidia_gpu:NvidiaGPUManager",
    },
    "hardware.hardware": {
        "HardwareType": INTERNAL,
        "HardwareConfig": "model.hardware:HardwareConfig",
        "NodeHardwareConfig": "hardware.registry:NodeHardwareConfig",
        "HardwareInfo": "model.hardware:HardwareInfo",
        "HardwareResource": "model.hardware:HardwareResource",
        "Hardware": "hardware.registry:Hardware",
    },
    "hardware.robots.auto_config": {
        "RobotAutoConfig": "hardware.robots.robot:RobotAutoConfig",
    },
    "hardware.robots.dosw1": {
        "DOSW1HWInfo": "hardware.robots.dosw1:DOSW1HWInfo",
        "DOSW1Robot": "hardware.robots.dosw1:DOSW1",
        "DOSW1HWConfig": "hardware.robots.dosw1:DOSW1Config",
    },
    "hardware.robots.dual_franka": {
        "DualFrankaHWInfo": "hardware.robots.franka:DualFrankaHWInfo",
        "DualFrankaRobot": "hardware.robots.franka:DualFranka",
        "DualFrankaConfig": "hardware.robots.franka:DualFrankaConfig",
    },
    "hardware.robots.franka": {
        "FrankaHWInfo": "hardware.robots.franka:FrankaHWInfo",
        "FrankaRobot": "hardware.robots.franka:Franka",
        "FrankaConfig": "hardware.robots.franka:FrankaConfig",
    },
    "hardware.robots.gim_arm": {
        "GimArmHWInfo": "hardware.robots.gim_arm:GimArmHWInfo",
        "GimArmRobot": "hardware.robots.gim_arm:GimArm",
        "GimArmConfig": "hardware.robots.gim_arm:GimArmConfig",
    },
    "hardware.robots.xsquare": {
        "Turtle2HWInfo": "hardware.robots.turtle2:Turtle2HWInfo",
        "Turtle2Robot": "hardware.robots.turtle2:Turtle2",
        "Turtle2Config": "hardware.robots.turtle2:Turtle2Config",
    },
    "manager.coll_manager": {
        "CollectiveGroupInfo": INTERNAL,
        "CollectiveManager": INTERNAL,
    },
    "manager.lock_manager": {
        "WorkerDeviceLock": INTERNAL,
        "DeviceLockManager": INTERNAL,
        "PortLockManager": INTERNAL,
    },
    "manager.manager": {
        "ManagerProxy": "worker.manager_proxy:ManagerProxy",
        "Manager": INTERNAL,
    },
    "manager.net_emulation": {
        "CrossDCPair": "config.net_emulation_config:CrossDCPair",
        "BandwidthGroup": "config.net_emulation_config:BandwidthGroup",
        "NetEmulationConfig": "config.net_emulation_config:NetEmulationConfig",
        "NetEmulationManager": "dropin.net_emulation:NetEmulationManager",
    },
    "manager.node_manager": {
        "NodeManager": INTERNAL,
    },
    "manager.tracer": {
        "Tracer": "dropin.line_tracer:LineTracer",
    },
    "manager.worker_manager": {
        "WorkerAddress": "model.address:WorkerAddress",
        "WorkerInfo": "model.address:WorkerInfo",
        "WorkerNode": INTERNAL,
        "WorkerManager": INTERNAL,
    },
    "placement.flexible": {
        "FlexiblePlacementStrategy": "placement.strategies:FlexiblePlacementStrategy",
    },
    "placement.node": {
        "NodePlacementStrategy": "placement.strategies:NodePlacementStrategy",
    },
    "placement.packed": {
        "PackedPlacementStrategy": "placement.strategies:PackedPlacementStrategy",
    },
    "placement.placement": {
        "MultiNodeGroupResolver": INTERNAL,
        "Placement": "model.placement:Placement",
        "PlacementStrategy": "placement.strategies:PlacementStrategy",
        "ComponentPlacement": "placement.component:ComponentPlacement",
    },
    "worker.lock": {
        "DeviceLock": "worker.device_lock:DeviceLock",
        "PortLock": INTERNAL,
    },
    "worker.routing": {
        "ROUTING_KEY_PREFIX": "routing.route_plan:ROUTING_KEY_PREFIX",
        "ROUTING_DEFAULT_TAG": "routing.route_plan:ROUTING_DEFAULT_TAG",
        "_build_channel_message": "routing.route_plan:build_return_route",
        "split_channel_message": "routing.route_plan:split_channel_message",
        "CommMapper": "routing.route_plan:CommMapper",
        "RouteEntry": "routing.route_plan:RouteEntry",
        "DecoupledRouteEntry": "routing.route_plan:DecoupledRouteEntry",
        "RoutePlan": "routing.route_plan:RoutePlan",
        "normalize_route_tag": "routing.route_plan:normalize_route_tag",
        "normalize_route_key": "routing.route_plan:normalize_route_key",
        "build_route_channel_key": "routing.route_plan:build_route_channel_key",
        "get_group_info": "routing.route_plan:get_group_info",
        "get_group_world_size": "routing.route_plan:get_group_world_size",
        "build_send_plan": "routing.route_plan:build_send_plan",
        "build_send_key": "routing.route_plan:build_send_key",
        "decoupled_build_send_plan": "routing.route_plan:decoupled_build_send_plan",
        "build_recv_plan": "routing.route_plan:build_recv_plan",
        "decoupled_build_recv_plan": "routing.route_plan:decoupled_build_recv_plan",
        "infer_batch_size": "routing.batches:infer_batch_size",
        "split_batch": "routing.batches:split_batch",
        "merge_batches": "routing.batches:merge_batches",
        "validate_batch_size": "routing.batches:validate_batch_size",
        "get_batch_size": "routing.batches:get_batch_size",
    },
    "worker.worker": {
        "WorkerMeta": INTERNAL,
        "Worker": "worker.worker:Worker",
    },
    "worker.worker_group": {
        "WorkerGroup": "group.group:WorkerGroup",
        "HiddenWorkerGroupFunc": INTERNAL,
        "WorkerGroupFunc": "group.method:RemoteMethod",
        "WorkerGroupFuncResult": "group.result:WorkerGroupFuncResult",
    },
}

PACKAGES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "": {
        "channel.channel": ("Channel",),
        "channel.channel_worker": ("ChannelWorker", "WeightedItem"),
        "cluster.cluster": ("Cluster",),
        "cluster.config": ("ClusterConfig",),
        "collective.collective_group": ("CollectiveGroupOptions",),
        "hardware.accelerators.accelerator": ("AcceleratorType", "AcceleratorUtil"),
        "hardware.robots.dosw1": ("DOSW1HWInfo",),
        "hardware.robots.dual_franka": ("DualFrankaHWInfo",),
        "hardware.robots.franka": ("FrankaHWInfo",),
        "hardware.robots.gim_arm": ("GimArmHWInfo",),
        "hardware.hardware": ("HardwareInfo",),
        "hardware.robots.xsquare": ("Turtle2HWInfo",),
        "manager.tracer": ("Tracer",),
        "manager.worker_manager": ("WorkerAddress", "WorkerInfo"),
        "placement.placement": ("ComponentPlacement", "PlacementStrategy"),
        "placement.flexible": ("FlexiblePlacementStrategy",),
        "placement.node": ("NodePlacementStrategy",),
        "placement.packed": ("PackedPlacementStrategy",),
        "worker.worker": ("Worker",),
        "worker.worker_group": ("WorkerGroupFuncResult",),
        "worker.routing": (
            "CommMapper",
            "build_recv_plan",
            "build_route_channel_key",
            "build_send_key",
            "build_send_plan",
            "decoupled_build_recv_plan",
            "get_batch_size",
            "get_group_world_size",
            "infer_batch_size",
            "merge_batches",
            "split_batch",
            "split_channel_message",
        ),
    },
    "channel": {
        "channel.channel": ("Channel",),
        "channel.channel_worker": ("ChannelWorker", "WeightedItem"),
    },
    "cluster": {
        "cluster.cluster": ("Cluster", "ClusterEnvVar"),
        "cluster.config": ("ClusterConfig", "NodeGroupConfig"),
        "cluster.node": ("NodeGroupInfo", "NodeInfo"),
        "cluster.utils": (
            "dataclass_arg_check",
            "load_user_extension_module",
            "parse_rank_config",
            "without_http_proxies",
        ),
    },
    "collective": {
        "collective.async_work": (
            "AsyncChannelCommWork",
            "AsyncChannelWork",
            "AsyncCollWork",
            "AsyncFuncWork",
            "AsyncRayWork",
            "AsyncRouteWork",
            "AsyncWork",
        ),
        "collective.collective": ("Collective",),
        "collective.collective_group": ("CollectiveGroup", "CollectiveGroupOptions"),
    },
    "hardware": {
        "hardware.accelerators.accelerator": ("Accelerator", "AcceleratorType", "AcceleratorUtil", "ProfileConfig"),
        "hardware.hardware": ("Hardware", "HardwareConfig", "HardwareInfo", "HardwareResource", "NodeHardwareConfig"),
        "hardware.robots.dosw1": ("DOSW1HWConfig", "DOSW1HWInfo"),
        "hardware.robots.dual_franka": ("DualFrankaConfig", "DualFrankaHWInfo"),
        "hardware.robots.franka": ("FrankaConfig", "FrankaHWInfo"),
        "hardware.robots.gim_arm": ("GimArmConfig", "GimArmHWInfo"),
        "hardware.robots.auto_config": ("RobotAutoConfig",),
        "hardware.robots.xsquare": ("Turtle2Config", "Turtle2HWInfo"),
    },
    "hardware.accelerators": {
        "hardware.accelerators.accelerator": (
            "Accelerator",
            "AcceleratorManager",
            "AcceleratorType",
            "AcceleratorUtil",
            "ProfileConfig",
        ),
        "hardware.accelerators.amd_gpu": ("AMDGPUManager", "RocprofSysConfig"),
        "hardware.accelerators.ascend_npu": ("AscendNPUManager",),
        "hardware.accelerators.intel_gpu": ("IntelGPUManager",),
        "hardware.accelerators.kunlun_xpu": ("KunlunXPUManager",),
        "hardware.accelerators.musa_gpu": ("MUSAGPUManager",),
        "hardware.accelerators.nvidia_gpu": ("NsightConfig", "NvidiaGPUManager"),
    },
    "hardware.robots": {
        "hardware.robots.auto_config": ("RobotAutoConfig",),
        "hardware.robots.dosw1": ("DOSW1HWConfig", "DOSW1HWInfo"),
        "hardware.robots.dual_franka": ("DualFrankaConfig", "DualFrankaHWInfo"),
        "hardware.robots.franka": ("FrankaConfig", "FrankaHWInfo"),
        "hardware.robots.gim_arm": ("GimArmConfig", "GimArmHWInfo"),
        "hardware.robots.xsquare": ("Turtle2Config", "Turtle2HWInfo"),
    },
    "manager": {
        "cluster.node": ("NodeInfo",),
        "manager.coll_manager": ("CollectiveGroupInfo", "CollectiveManager"),
        "manager.lock_manager": ("DeviceLockManager", "PortLockManager"),
        "manager.manager": ("Manager",),
        "manager.net_emulation": ("NetEmulationConfig", "NetEmulationManager"),
        "manager.node_manager": ("NodeManager",),
        "manager.tracer": ("Tracer",),
        "manager.worker_manager": ("WorkerAddress", "WorkerInfo", "WorkerManager"),
    },
    "placement": {
        "placement.flexible": ("FlexiblePlacementStrategy",),
        "placement.node": ("NodePlacementStrategy",),
        "placement.packed": ("PackedPlacementStrategy",),
        "placement.placement": ("ComponentPlacement", "Placement", "PlacementStrategy"),
    },
    "worker": {
        "worker.routing": (
            "CommMapper",
            "DecoupledRouteEntry",
            "RouteEntry",
            "RoutePlan",
            "_build_channel_message",
            "build_recv_plan",
            "build_route_channel_key",
            "build_send_key",
            "build_send_plan",
            "decoupled_build_recv_plan",
            "decoupled_build_send_plan",
            "get_batch_size",
            "get_group_info",
            "get_group_world_size",
            "infer_batch_size",
            "merge_batches",
            "split_batch",
            "split_channel_message",
            "validate_batch_size",
        ),
        "manager.worker_manager": ("WorkerAddress",),
        "worker.worker": ("Worker",),
        "worker.worker_group": ("WorkerGroup", "WorkerGroupFunc", "WorkerGroupFuncResult"),
    },
}

RAY_NAMES = frozenset(
    {
        "is_initialized",
        "shutdown",
        "actor.ActorHandle",
        "util.get_node_ip_address",
        "util.queue.Empty",
        "util.queue.Full",
        "util.queue.Queue",
    }
)
"""What the stand-in of `ray` has (rlinf_actors.dropin.ray_stand_in)."""
