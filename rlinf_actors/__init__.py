"""rlinf-actors: RLinf's scheduler layer (clusters, placements, workers, groups) without Ray.

Names are loaded when they are first used, so that this import brings in no torch, no ZeroMQ and no thread. On other
operating systems than Linux this import works, and the first use of a name raises ImportError.
"""

from typing import TYPE_CHECKING

from rlinf_actors.version import VERSION as __version__

if TYPE_CHECKING:
    from rlinf_actors.channel.assembled import WeightedItem as WeightedItem
    from rlinf_actors.channel.channel import Channel as Channel
    from rlinf_actors.channel.results import Take as Take
    from rlinf_actors.channel.results import UndeliverableItem as UndeliverableItem
    from rlinf_actors.cluster.cluster import Cluster as Cluster
    from rlinf_actors.cluster.cluster_names import ClusterEnvVar as ClusterEnvVar
    from rlinf_actors.cluster.cluster_names import PathEnvMergeMode as PathEnvMergeMode
    from rlinf_actors.config.cluster_config import ClusterConfig as ClusterConfig
    from rlinf_actors.config.cluster_config import NodeGroupConfig as NodeGroupConfig
    from rlinf_actors.config.profiling_config import NsightConfig as NsightConfig
    from rlinf_actors.config.profiling_config import ProfileConfig as ProfileConfig
    from rlinf_actors.config.profiling_config import RocprofSysConfig as RocprofSysConfig
    from rlinf_actors.config.profiling_config import TorchProfileConfig as TorchProfileConfig
    from rlinf_actors.errors import AuthenticationError as AuthenticationError
    from rlinf_actors.errors import CallTimeoutError as CallTimeoutError
    from rlinf_actors.errors import ChannelBrokenError as ChannelBrokenError
    from rlinf_actors.errors import ChannelClosedError as ChannelClosedError
    from rlinf_actors.errors import ClusterTimeoutError as ClusterTimeoutError
    from rlinf_actors.errors import ConfigError as ConfigError
    from rlinf_actors.errors import ConnectionLostError as ConnectionLostError
    from rlinf_actors.errors import EmergencyStopError as EmergencyStopError
    from rlinf_actors.errors import EndedError as EndedError
    from rlinf_actors.errors import GroupClosedError as GroupClosedError
    from rlinf_actors.errors import GroupNotFoundError as GroupNotFoundError
    from rlinf_actors.errors import HardwareInUseError as HardwareInUseError
    from rlinf_actors.errors import InternalError as InternalError
    from rlinf_actors.errors import ItemNotProcessedError as ItemNotProcessedError
    from rlinf_actors.errors import NameInUseError as NameInUseError
    from rlinf_actors.errors import NodeLostError as NodeLostError
    from rlinf_actors.errors import NodeRankError as NodeRankError
    from rlinf_actors.errors import NotTheHeadError as NotTheHeadError
    from rlinf_actors.errors import PeerDiedError as PeerDiedError
    from rlinf_actors.errors import PlacementError as PlacementError
    from rlinf_actors.errors import ProtocolError as ProtocolError
    from rlinf_actors.errors import ProtocolMismatchError as ProtocolMismatchError
    from rlinf_actors.errors import RemoteWireError as RemoteWireError
    from rlinf_actors.errors import RlinfActorsError as RlinfActorsError
    from rlinf_actors.errors import RoutingError as RoutingError
    from rlinf_actors.errors import SerializationError as SerializationError
    from rlinf_actors.errors import UsageError as UsageError
    from rlinf_actors.errors import WorkerDiedError as WorkerDiedError
    from rlinf_actors.errors import WorkerError as WorkerError
    from rlinf_actors.errors import WorkerStartError as WorkerStartError
    from rlinf_actors.errors import WrongServerError as WrongServerError
    from rlinf_actors.group.group import WorkerGroup as WorkerGroup
    from rlinf_actors.group.result import WorkerGroupFuncResult as WorkerGroupFuncResult
    from rlinf_actors.hardware.accelerators import Accelerator as Accelerator
    from rlinf_actors.hardware.accelerators import AcceleratorUtil as AcceleratorUtil
    from rlinf_actors.hardware.identity import Identity as Identity
    from rlinf_actors.hardware.identity import address_identities as address_identities
    from rlinf_actors.hardware.identity import device_identity as device_identity
    from rlinf_actors.hardware.registry import Hardware as Hardware
    from rlinf_actors.hardware.registry import NodeHardwareConfig as NodeHardwareConfig
    from rlinf_actors.hardware.robots.dosw1 import DOSW1Config as DOSW1Config
    from rlinf_actors.hardware.robots.dosw1 import DOSW1HWInfo as DOSW1HWInfo
    from rlinf_actors.hardware.robots.franka import DualFrankaConfig as DualFrankaConfig
    from rlinf_actors.hardware.robots.franka import DualFrankaHWInfo as DualFrankaHWInfo
    from rlinf_actors.hardware.robots.franka import FrankaConfig as FrankaConfig
    from rlinf_actors.hardware.robots.franka import FrankaHWInfo as FrankaHWInfo
    from rlinf_actors.hardware.robots.gim_arm import GimArmConfig as GimArmConfig
    from rlinf_actors.hardware.robots.gim_arm import GimArmHWInfo as GimArmHWInfo
    from rlinf_actors.hardware.robots.turtle2 import Turtle2Config as Turtle2Config
    from rlinf_actors.hardware.robots.turtle2 import Turtle2HWInfo as Turtle2HWInfo
    from rlinf_actors.hardware.vendors.catalog import FoundAccelerators as FoundAccelerators
    from rlinf_actors.messaging.process_groups import CollectiveGroupOptions as CollectiveGroupOptions
    from rlinf_actors.model.accelerator_table import AcceleratorFacts as AcceleratorFacts
    from rlinf_actors.model.accelerator_table import ProcessGroupFacts as ProcessGroupFacts
    from rlinf_actors.model.address import WorkerAddress as WorkerAddress
    from rlinf_actors.model.address import WorkerInfo as WorkerInfo
    from rlinf_actors.model.hardware import AcceleratorInfo as AcceleratorInfo
    from rlinf_actors.model.hardware import AcceleratorType as AcceleratorType
    from rlinf_actors.model.hardware import HardwareConfig as HardwareConfig
    from rlinf_actors.model.hardware import HardwareInfo as HardwareInfo
    from rlinf_actors.model.hardware import HardwareResource as HardwareResource
    from rlinf_actors.model.node import NodeGroupInfo as NodeGroupInfo
    from rlinf_actors.model.node import NodeInfo as NodeInfo
    from rlinf_actors.model.placement import Placement as Placement
    from rlinf_actors.model.restart import RestartPolicy as RestartPolicy
    from rlinf_actors.placement.component import ComponentPlacement as ComponentPlacement
    from rlinf_actors.placement.strategies import FlexiblePlacementStrategy as FlexiblePlacementStrategy
    from rlinf_actors.placement.strategies import NodePlacementStrategy as NodePlacementStrategy
    from rlinf_actors.placement.strategies import PackedPlacementStrategy as PackedPlacementStrategy
    from rlinf_actors.placement.strategies import PlacementStrategy as PlacementStrategy
    from rlinf_actors.placement.strategies import StridedPlacementStrategy as StridedPlacementStrategy
    from rlinf_actors.routing.batches import get_batch_size as get_batch_size
    from rlinf_actors.routing.batches import infer_batch_size as infer_batch_size
    from rlinf_actors.routing.batches import merge_batches as merge_batches
    from rlinf_actors.routing.batches import split_batch as split_batch
    from rlinf_actors.routing.route_plan import CommMapper as CommMapper
    from rlinf_actors.routing.route_plan import build_recv_plan as build_recv_plan
    from rlinf_actors.routing.route_plan import build_route_channel_key as build_route_channel_key
    from rlinf_actors.routing.route_plan import build_send_key as build_send_key
    from rlinf_actors.routing.route_plan import build_send_plan as build_send_plan
    from rlinf_actors.routing.route_plan import decoupled_build_recv_plan as decoupled_build_recv_plan
    from rlinf_actors.routing.route_plan import get_group_world_size as get_group_world_size
    from rlinf_actors.routing.route_plan import split_channel_message as split_channel_message
    from rlinf_actors.runtime.future import AsyncWork as AsyncWork
    from rlinf_actors.runtime.route_work import AsyncRouteWork as AsyncRouteWork
    from rlinf_actors.tracing.tracer import Tracer as Tracer
    from rlinf_actors.worker.channel_worker import ChannelWorker as ChannelWorker
    from rlinf_actors.worker.worker import Worker as Worker

_MODULES = {
    "channel.assembled": ("WeightedItem",),
    "channel.results": ("Take", "UndeliverableItem"),
    "channel.channel": ("Channel",),
    "cluster.cluster": ("Cluster",),
    "cluster.cluster_names": ("ClusterEnvVar", "PathEnvMergeMode"),
    "config.cluster_config": ("ClusterConfig", "NodeGroupConfig"),
    "config.profiling_config": ("NsightConfig", "ProfileConfig", "RocprofSysConfig", "TorchProfileConfig"),
    "errors": (
        "AuthenticationError",
        "CallTimeoutError",
        "ChannelBrokenError",
        "ChannelClosedError",
        "ClusterTimeoutError",
        "ConfigError",
        "ConnectionLostError",
        "EmergencyStopError",
        "EndedError",
        "GroupClosedError",
        "GroupNotFoundError",
        "HardwareInUseError",
        "InternalError",
        "ItemNotProcessedError",
        "NameInUseError",
        "NodeLostError",
        "NodeRankError",
        "NotTheHeadError",
        "PeerDiedError",
        "PlacementError",
        "ProtocolError",
        "ProtocolMismatchError",
        "RemoteWireError",
        "RlinfActorsError",
        "RoutingError",
        "SerializationError",
        "UsageError",
        "WorkerDiedError",
        "WorkerError",
        "WorkerStartError",
        "WrongServerError",
    ),
    "group.group": ("WorkerGroup",),
    "group.result": ("WorkerGroupFuncResult",),
    "hardware.accelerators": ("Accelerator", "AcceleratorUtil"),
    "hardware.identity": ("Identity", "address_identities", "device_identity"),
    "hardware.registry": ("Hardware", "NodeHardwareConfig"),
    "hardware.robots.dosw1": ("DOSW1Config", "DOSW1HWInfo"),
    "hardware.robots.franka": ("DualFrankaConfig", "DualFrankaHWInfo", "FrankaConfig", "FrankaHWInfo"),
    "hardware.robots.gim_arm": ("GimArmConfig", "GimArmHWInfo"),
    "hardware.robots.turtle2": ("Turtle2Config", "Turtle2HWInfo"),
    "hardware.vendors.catalog": ("FoundAccelerators",),
    "model.accelerator_table": ("AcceleratorFacts", "ProcessGroupFacts"),
    "model.address": ("WorkerAddress", "WorkerInfo"),
    "model.hardware": ("AcceleratorInfo", "AcceleratorType", "HardwareConfig", "HardwareInfo", "HardwareResource"),
    "model.node": ("NodeGroupInfo", "NodeInfo"),
    "model.placement": ("Placement",),
    "model.restart": ("RestartPolicy",),
    "placement.component": ("ComponentPlacement",),
    "placement.strategies": (
        "FlexiblePlacementStrategy",
        "NodePlacementStrategy",
        "PackedPlacementStrategy",
        "PlacementStrategy",
        "StridedPlacementStrategy",
    ),
    "routing.batches": (
        "get_batch_size",
        "infer_batch_size",
        "merge_batches",
        "split_batch",
    ),
    "routing.route_plan": (
        "CommMapper",
        "build_recv_plan",
        "build_route_channel_key",
        "build_send_key",
        "build_send_plan",
        "decoupled_build_recv_plan",
        "get_group_world_size",
        "split_channel_message",
    ),
    "runtime.future": ("AsyncWork",),
    "runtime.route_work": ("AsyncRouteWork",),
    "messaging.process_groups": ("CollectiveGroupOptions",),
    "worker.channel_worker": ("ChannelWorker",),
    "tracing.tracer": ("Tracer",),
    "worker.worker": ("Worker",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604 - computed from the table above

if not TYPE_CHECKING:  # a type checker takes the imports above, and finds names that do not exist

    def __getattr__(name):
        module = _HOME.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        from rlinf_actors.platforms import why_not_here

        why = why_not_here(f"{__name__}.{name}")
        if why:
            raise ImportError(why)
        value = getattr(import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
