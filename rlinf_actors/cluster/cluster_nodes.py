"""What the head says of nodes, as the NodeInfo that placements and users work with. Pure.

What a Cluster says of its nodes: as they were when it started, without asking anybody.

The robots and other hardware that node groups own: each node is asked for its own, before anything is placed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from rlinf_actors import exhaustion
from rlinf_actors.cluster.service import import_paths
from rlinf_actors.config.cluster_config import ClusterConfig, HardwareSection, NodeGroupConfig, cluster_section
from rlinf_actors.errors import ConfigError, NodeLostError, PlacementError
from rlinf_actors.hardware import extensions
from rlinf_actors.hardware.configured import enumerate_values, info_of, merge, piece_of, section_error, values_of
from rlinf_actors.hardware.probe_report import holds_accelerators
from rlinf_actors.hardware.registry import hardware_classes, hardware_types, is_exclusive
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareInfo, HardwareResource, is_accelerator_type
from rlinf_actors.model.node import CLUSTER_GROUP, NodeGroupInfo, NodeInfo
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.settings import EXT_MODULE, Settings
from rlinf_actors.wire.client_messages import Enumerated, EnumerateHardware
from rlinf_actors.wire.values import Extension, HardwareAnswer, HardwareQuestion, HardwareReport, NodeState, Piece

_ACCELERATOR_FIELDS = {field.name for field in fields(AcceleratorInfo)} - {"type", "model"}


def node_info(state: NodeState) -> NodeInfo:
    """One node."""
    report = state.report
    return NodeInfo(
        node_labels=list(report.labels),
        node_rank=state.rank,
        ray_id=report.node_id,
        node_ip=report.ip,
        num_cpus=report.num_cpus,
        python_interpreter_path=report.interpreter,
        default_env_vars={},
        env_vars=dict(report.env_vars),
        hardware_resources=[
            HardwareResource(
                resource.type,
                [_hardware(info, holds_accelerators(resource)) for info in resource.infos],
                resource.registered_by,
            )
            for resource in report.resources
        ],
        profiler_backends=list(report.profilers),
        interfaces=dict(report.interfaces),
        interface=report.interface,
    )


def node_infos(states: Sequence[NodeState]) -> list[NodeInfo]:
    """Nodes that have a rank, by rank."""
    return [node_info(state) for state in sorted(states, key=lambda state: state.rank) if state.rank >= 0]


def _hardware(report: HardwareReport, accelerator: bool) -> HardwareInfo:
    if accelerator or is_accelerator_type(report.type):
        known = {name: value for name, value in report.detail.items() if name in _ACCELERATOR_FIELDS}
        return AcceleratorInfo(report.type, report.model, **known)  # type: ignore[arg-type]
    info = HardwareInfo(report.type, report.model)
    info.__dict__.update(report.detail)
    return info


class ClusterView:
    """The nodes of a cluster by their ranks. Any thread."""

    runtime: Runtime
    _states: list[NodeState]
    _nodes: list[NodeInfo]
    _groups: dict[str, NodeGroupInfo]

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self._nodes)

    @property
    def num_accelerators(self) -> int:
        """Number of accelerators on all nodes."""
        return sum(node.num_accelerators for node in self._nodes)

    @property
    def accelerator_ranks(self) -> list[list[int]]:
        """For each node the ranks of its accelerators, counted through the cluster."""
        ranks, first = [], 0
        for node in self._nodes:
            ranks.append(list(range(first, first + node.num_accelerators)))
            first += node.num_accelerators
        return ranks

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """The node of that rank. Raises PlacementError if there is none."""
        if not 0 <= node_rank < len(self._nodes):
            raise PlacementError(f"node {node_rank} is not in this cluster, which has nodes 0-{len(self._nodes) - 1}")
        return self._nodes[node_rank]

    def get_node_ip(self, node_rank: int) -> str:
        """Address of the node of that rank."""
        return self.get_node_info(node_rank).node_ip

    def node_name(self, node_rank: int) -> str:
        """How messages to people call the node of that rank."""
        for state in self._states:
            if state.rank == node_rank:
                return state.report.hostname
        return str(node_rank)

    def here(self) -> int:
        """Rank of the node whose machine this process runs on (the first, of several), 0 if it is none of them."""
        return min((state.rank for state in self._states if state.report.host == self.runtime.host), default=0)

    def get_node_group(self, label: str = CLUSTER_GROUP) -> NodeGroupInfo | None:
        """The node group of that label, None if there is none."""
        return self._groups.get(str(label))


LIMIT_S = 10.0
"""Seconds that a type may take on a node to find its pieces."""
ANSWER_S = LIMIT_S + 10.0
"""Seconds until the head must have answered; it gives up on a node 5 s sooner, and says which."""

_SCRIPT = ("__main__", "__mp_main__")

Ask = Callable[[EnumerateHardware], Awaitable[Enumerated]]
Pieces = Mapping[int, Sequence[Piece]]
"""By node rank what the nodes said."""


def read_config(source: Any) -> ClusterConfig:
    """The configuration, checked, with installed packages loaded if it asks for a hardware type that is not known.

    Raises:
        ConfigError: it is wrong.
    """
    if isinstance(source, ClusterConfig):
        return source
    section = cluster_section(source)
    groups = section.get("node_groups")
    kinds = [
        str(group["hardware"].get("type", ""))
        for group in (groups if isinstance(groups, Sequence) else ())
        if isinstance(group, Mapping) and isinstance(group.get("hardware"), Mapping)
    ]
    faults = extensions.load_types(kinds)
    try:
        return ClusterConfig.from_any(section, hardware_types=hardware_types())
    except ConfigError as error:
        if faults and error.path.endswith(".hardware.type"):
            raise ConfigError(f"{error.args[0]}. Not loaded: {'; '.join(faults)}", path=error.path) from None
        raise


@dataclass(frozen=True)
class _Look:
    """One node group's hardware on one node."""

    group: NodeGroupConfig
    path: str
    state: NodeState
    question: HardwareQuestion


async def ask_nodes(config: ClusterConfig, states: Sequence[NodeState], ask: Ask, host: str = "") -> list[NodeInfo]:
    """The nodes with what they say that they have of the hardware their groups own. Cancelling gives up.

    A type that only the running script registers cannot be loaded by a node: on this machine it is asked here.

    Args:
        config: the configuration.
        states: the nodes, with their ranks.
        ask: asks the head.
        host: of this process, as the nodes' reports name theirs.

    Raises:
        ConfigError: a node does not know a type, the type refuses its entries there, or crashed, hung or talked
            nonsense; the first one, in the order of the configuration.
        NodeLostError: a node was lost meanwhile.
        ClusterTimeoutError: a node, or the head, gave no answer.
    """
    infos = node_infos(states)
    looks = _looks(config, states, infos)
    answers = await asyncio.gather(*(ask(_message(look)) for look in looks), return_exceptions=True)
    found: dict[int, list[HardwareResource]] = {}
    for look, answer in zip(looks, answers, strict=True):
        if isinstance(answer, NodeLostError):
            raise NodeLostError(f"{look.path}: {answer}") from answer
        if isinstance(answer, BaseException):
            raise answer
        if answer.answer.kind == "unregistered" and _is_the_scripts(look.question.type):
            resource = await _ask_here(look, host)
        else:
            resource = _resource(look, answer.answer)
        merge(found.setdefault(look.state.rank, []), resource)
    _check_distinct(found)
    return [_with(node, found.get(node.node_rank, ())) for node in infos]


def _check_distinct(found: Mapping[int, Sequence[HardwareResource]]) -> None:
    """That no robot was given twice: two workers of one group would both move it.

    Raises:
        ConfigError: one was, on one node or on two.
    """
    owners: dict[str, str] = {}
    for rank, resources in found.items():
        for resource in resources:
            for number, info in enumerate(resource.infos if is_exclusive(resource.type) else ()):
                where = f"{resource.type} {number} of node {rank}"
                for key in info.claim_keys:
                    if key in owners:
                        raise ConfigError(
                            f"{owners[key]} and {where} are the same robot, {info.identity}: name each once",
                            path="cluster.node_groups",
                        )
                    owners[key] = where


def pieces_of(config: ClusterConfig | None, nodes: Sequence[NodeInfo]) -> dict[int, list[Piece]]:
    """What the nodes said, as plain values for the workers."""
    if config is None:
        return {}
    found: dict[int, list[Piece]] = {}
    for node in nodes:
        for kind in config.get_hardware_configs(node.node_rank):
            found.setdefault(node.node_rank, []).extend(piece_of(info) for info in node.get_hardware_infos(kind))
    return found


def with_pieces(nodes: Sequence[NodeInfo], pieces: Pieces) -> list[NodeInfo]:
    """*nodes* with what others have heard from them."""
    found: list[NodeInfo] = []
    for node in nodes:
        by_type: dict[str, list[Piece]] = {}
        for piece in pieces.get(node.node_rank, ()):
            by_type.setdefault(piece.type, []).append(piece)
        resources = [HardwareResource(kind, [info_of(piece) for piece in some]) for kind, some in by_type.items()]
        found.append(_with(node, resources))
    return found


def _with(node: NodeInfo, found: Sequence[HardwareResource]) -> NodeInfo:
    """*node* with *found* in place of what it reports of those types."""
    kinds = {resource.type for resource in found}
    kept = [resource for resource in node.hardware_resources if resource.type not in kinds]
    return replace(node, hardware_resources=[*kept, *found])


def _looks(config: ClusterConfig, states: Sequence[NodeState], infos: Sequence[NodeInfo]) -> list[_Look]:
    by_rank = {state.rank: state for state in states}
    by_node = {info.node_rank: info for info in infos}
    looks: list[_Look] = []
    sys_path = import_paths() if any(group.hardware is not None for group in config.node_groups) else []
    merge_mode = Settings.load().path_env_merge_mode
    for index, group in enumerate(config.node_groups):
        if group.hardware is None:
            continue
        kind, path = group.hardware.type, f"cluster.node_groups[{index}].hardware"
        for rank in group.node_ranks:
            entries = values_of(group.hardware, rank)
            if rank not in by_rank or entries == []:
                continue
            if not hardware_classes(kind) and by_node[rank].get_hw_resource_count(kind):
                continue  # a type that nobody has defined, on a node that is described with it
            chosen = next((one for one in group.env_configs if rank in one.node_ranks), None)
            question = HardwareQuestion(
                kind,
                rank,
                msgspec.json.encode(entries, enc_hook=str).decode(),
                chosen.python_interpreter_path if chosen is not None else None,
                dict(chosen.env_vars) if chosen is not None else {},
                merge_mode,
                sys_path,
                _told(kind),
                LIMIT_S,
            )
            looks.append(_Look(group, path, by_rank[rank], question))
    return looks


def _told(kind: str) -> list[Extension]:
    """What registers a type here: the node loads what it has of it."""
    known = hardware_types()
    classes = [*hardware_classes(kind), *([known[kind]] if kind in known else [])]
    return list(dict.fromkeys([*extensions.loaded(), *extensions.providers(cls.__module__ for cls in classes)]))


def _message(look: _Look) -> EnumerateHardware:
    return EnumerateHardware(look.state.report.node_id, look.question)


def _is_the_scripts(kind: str) -> bool:
    """Whether the running script itself defines a type's class, so that no other process can import it."""
    return any(cls.__module__ in _SCRIPT for cls in hardware_classes(kind))


async def _ask_here(look: _Look, host: str) -> HardwareResource | None:
    """What a type of the script's finds, if this machine is the node's. On a thread: it may take its time."""
    assert look.group.hardware is not None
    kind, rank, name = look.question.type, look.question.node_rank, look.state.report.hostname
    if look.state.report.host != host:
        raise ConfigError(
            f"{kind!r} is registered by the script that runs, which node {name} cannot load: move its classes to a "
            f"module that can be imported there, and name that in {EXT_MODULE} if it is not on the script's path",
            path=f"{look.path}.type",
        )
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[HardwareResource | None] = loop.create_future()

    def tell(resource: HardwareResource | None, error: Exception | None) -> None:
        if answer.done():
            return  # given up
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(resource)

    def ask(section: HardwareSection) -> None:
        try:
            found = enumerate_values(kind, rank, values_of(section, rank))
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            loop.call_soon_threadsafe(tell, None, error)
        else:
            loop.call_soon_threadsafe(tell, found, None)

    # A daemon of its own: one that hangs keeps neither this wait nor the end of the script.
    exhaustion.start(threading.Thread(target=ask, args=(look.group.hardware,), name=f"look for {kind}", daemon=True))
    try:
        return await asyncio.wait_for(answer, LIMIT_S)
    except asyncio.TimeoutError:
        raise ConfigError(
            f"enumerate() of {kind}, which the script registers, gave no answer for node {name} within {LIMIT_S:g} s",
            path=look.path,
        ) from None
    except ConfigError as error:
        raise section_error(error, look.group.hardware, rank, look.path, f" (on node {name})") from None


def _resource(look: _Look, answer: HardwareAnswer) -> HardwareResource | None:
    assert look.group.hardware is not None
    kind, name = look.question.type, look.state.report.hostname
    if answer.kind == "config":
        error = ConfigError(answer.text, path=answer.path)
        raise section_error(error, look.group.hardware, look.question.node_rank, look.path, f" (on node {name})")
    if answer.kind == "unregistered":
        why = f" Not loaded there: {answer.text}." if answer.text else ""
        python = look.question.interpreter or look.state.report.interpreter
        raise ConfigError(
            f"node {name} does not know hardware type {kind!r}.{why} Install the package that registers it for "
            f"{python} there, or set {EXT_MODULE} to its module for that node's agentd, or in the group's env_configs",
            path=f"{look.path}.type",
        )
    if answer.kind:
        raise ConfigError(f"node {name} cannot say which {kind} it has: {answer.text}", path=look.path)
    infos = [info_of(piece, look.path) for piece in answer.pieces]
    return HardwareResource(kind, infos) if infos else None
