"""Nodes as placements and users see them: the nodes that the head knows, with the configured hardware of node groups.

Only a node itself can find its configured hardware, so `ask_nodes` lets each node enumerate that hardware before
workers are placed. A node cannot load a hardware type that only the running script registers; this process enumerates
such hardware for a node on its own machine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from rlinf_actors import exhaustion
from rlinf_actors.cluster.service import import_paths
from rlinf_actors.errors import ConfigError, NodeLostError
from rlinf_actors.hardware import extensions
from rlinf_actors.hardware.configured import enumerate_values, info_of, merge, piece_of, section_error, values_of
from rlinf_actors.hardware.identity import identities_of, on_its_host
from rlinf_actors.hardware.probe_report import resources_from_reports
from rlinf_actors.hardware.registry import hardware_classes, hardware_types, is_exclusive
from rlinf_actors.model.hardware import HardwareResource
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.settings import EXT_MODULE, Settings
from rlinf_actors.shown import html_table
from rlinf_actors.wire.client_messages import Enumerated, EnumerateHardware
from rlinf_actors.wire.values import Extension, HardwareAnswer, HardwareQuestion, NodeState, Piece

if TYPE_CHECKING:
    from rlinf_actors.config.cluster_config import ClusterConfig, HardwareSection, NodeGroupConfig


def node_info(state: NodeState) -> NodeInfo:
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
        hardware_resources=resources_from_reports(report.resources),
        profiler_backends=list(report.profilers),
        interfaces=dict(report.interfaces),
        interface=report.interface,
        closed=state.closed,
    )


def node_infos(states: Sequence[NodeState]) -> list[NodeInfo]:
    """Return, in rank order, the nodes that have a rank, in the form that placements and users see.

    *states* are the nodes as the head describes them.
    """
    return [node_info(state) for state in sorted(states, key=lambda state: state.rank) if state.rank >= 0]


LIMIT_S = 10.0
"""Seconds that a node may take to enumerate the configured hardware of one type."""
ANSWER_S = LIMIT_S + 10.0
"""Seconds that the head may take to answer. The head gives up on a node 5 s earlier and names the node."""

_SCRIPT = ("__main__", "__mp_main__")
"""Modules of the running script, which no other process can import."""

Ask = Callable[[EnumerateHardware], Awaitable[Enumerated]]
Pieces = Mapping[int, Sequence[Piece]]
"""Configured hardware that nodes have reported, by node rank."""


def read_config(source: Any) -> ClusterConfig:
    """Read and check the ``cluster:`` section of a configuration.

    If the section names hardware types that this process does not know, installed packages that register them are
    imported first.

    Args:
        source: a ClusterConfig, a mapping, the path of a YAML file, or an OmegaConf DictConfig.
    """
    from rlinf_actors.config.cluster_config import ClusterConfig, cluster_section

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


class _Query(msgspec.Struct, frozen=True):
    """A question to one node: which configured hardware of one node group does the node have?

    `path` is the place of that hardware in the configuration, for error messages.
    """

    group: NodeGroupConfig
    path: str
    state: NodeState
    question: HardwareQuestion


async def ask_nodes(config: ClusterConfig, states: Sequence[NodeState], ask: Ask, host: str = "") -> list[NodeInfo]:
    """Let each node enumerate the hardware that is configured for its node groups; return the nodes with that hardware.

    Args:
        config: the configuration, which says which hardware each node group has.
        states: the nodes, as the head describes them.
        ask: sends an EnumerateHardware message to the head, and returns the answer of the node.
        host: host key of this machine.

    Raises:
        ConfigError: a node does not know a hardware type; or the type rejects its entries in the configuration; or the
            enumeration crashed, hung or returned invalid data. Of several errors the first in the
            configuration is raised.
        NodeLostError: a node was lost meanwhile.
        ClusterTimeoutError: a node or the head did not answer.
    """
    infos = node_infos(states)
    queries = _queries(config, states, infos)
    questions = [EnumerateHardware(query.state.report.node_id, query.question) for query in queries]
    answers = await asyncio.gather(*map(ask, questions), return_exceptions=True)
    found: dict[int, list[HardwareResource]] = {}
    for query, answer in zip(queries, answers, strict=True):
        if isinstance(answer, NodeLostError):
            raise NodeLostError(f"{query.path}: {answer}") from answer
        if isinstance(answer, BaseException):
            raise answer
        if answer.answer.kind == "unregistered" and any(
            cls.__module__ in _SCRIPT for cls in hardware_classes(query.question.type)
        ):
            resource = await _ask_here(query, host)
        else:
            resource = _resource(query, answer.answer)
        merge(found.setdefault(query.state.rank, []), resource)
    first = dict[str, int]()  # rank by host: agentds of one host have the same devices and loopback addresses
    for state in sorted(states, key=lambda one: one.rank):
        first.setdefault(state.report.host, state.rank)
    homes = {state.rank: first[state.report.host] for state in states}
    _settle_identities(found, {node.node_rank: node for node in infos}, homes)
    return [_with_hardware(node, found.get(node.node_rank, ())) for node in infos]


def _settle_identities(
    found: Mapping[int, Sequence[HardwareResource]], nodes: Mapping[int, NodeInfo], homes: Mapping[int, int]
) -> None:
    """Give robots at different addresses of one host the same identity, in place.

    *homes* maps the rank of each node to the lowest rank on its host. Raise ConfigError if the configuration names the
    same robot twice; else two workers could move the robot.
    """
    owners = dict[object, tuple[str, str]]()
    ranks = {node.node_ip: rank for rank, node in nodes.items()}
    for rank, resources in found.items():
        near = {**ranks, **dict.fromkeys(nodes[rank].interfaces.values(), rank)}
        for resource in resources:
            for number, info in enumerate(resource.infos if is_exclusive(resource.type) else ()):
                where = f"{resource.type} {number} of node {rank}"
                info.identities = [on_its_host(one, near, homes) for one in info.identities]
                for one in identities_of(info):
                    other, name = owners.setdefault(one, (where, info.identity))
                    if other != where:
                        names = " = ".join(dict.fromkeys(filter(None, [name, info.identity]))) or one.name
                        raise ConfigError(
                            f"{other} and {where} are the same robot, {names}: name each once",
                            path="cluster.node_groups",
                        )


def pieces_of(config: ClusterConfig | None, nodes: Sequence[NodeInfo]) -> dict[int, list[Piece]]:
    """Return the configured hardware of each node, by node rank, in the form in which it is sent to workers."""
    if config is None:
        return {}
    found: dict[int, list[Piece]] = {}
    for node in nodes:
        for kind in config.get_hardware_configs(node.node_rank):
            found.setdefault(node.node_rank, []).extend(piece_of(info) for info in node.get_hardware_infos(kind))
    return found


def with_pieces(nodes: Sequence[NodeInfo], pieces: Pieces) -> list[NodeInfo]:
    """Return *nodes* with their configured hardware added, in a worker, which does not ask the nodes for it.

    *pieces* is the hardware by node rank, which the launching process has sent with the worker's class.
    """
    found: list[NodeInfo] = []
    for node in nodes:
        by_type: dict[str, list[Piece]] = {}
        for piece in pieces.get(node.node_rank, ()):
            by_type.setdefault(piece.type, []).append(piece)
        resources = [HardwareResource(kind, [info_of(piece) for piece in some]) for kind, some in by_type.items()]
        found.append(_with_hardware(node, resources))
    return found


def _with_hardware(node: NodeInfo, found: Sequence[HardwareResource]) -> NodeInfo:
    """Return *node* with the hardware *found* added. The node's earlier hardware of the same types is left out."""
    kinds = {resource.type for resource in found}
    kept = [resource for resource in node.hardware_resources if resource.type not in kinds]
    return replace(node, hardware_resources=[*kept, *found])


def _queries(config: ClusterConfig, states: Sequence[NodeState], infos: Sequence[NodeInfo]) -> list[_Query]:
    by_rank = {state.rank: state for state in states}
    by_node = {info.node_rank: info for info in infos}
    queries: list[_Query] = []
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
                continue  # a type without a class, on a node that is described with it
            chosen = next((one for one in group.env_configs if rank in one.node_ranks), None)
            question = HardwareQuestion(
                kind,
                rank,
                msgspec.json.encode(entries, enc_hook=str).decode(),
                chosen.python_interpreter_path if chosen is not None else None,
                chosen.variables if chosen is not None else {},
                merge_mode,
                sys_path,
                _extensions(kind),
                LIMIT_S,
            )
            queries.append(_Query(group, path, by_rank[rank], question))
    return queries


def _extensions(kind: str) -> list[Extension]:
    """Return the modules that this process has loaded to know hardware type *kind*, for nodes to import too."""
    known = hardware_types()
    classes = [*hardware_classes(kind), *([known[kind]] if kind in known else [])]
    return list(dict.fromkeys([*extensions.loaded(), *extensions.providers(cls.__module__ for cls in classes)]))


async def _ask_here(query: _Query, host: str) -> HardwareResource | None:
    """Answer *query* in this process, because only the running script registers the hardware type.

    The enumeration is user code and may block, so it runs on a thread of its own.

    Args:
        query: the question to the node.
        host: host key of this machine.

    Raises:
        ConfigError: the node is on another machine, or the enumeration failed or took longer than LIMIT_S.
    """
    assert query.group.hardware is not None
    kind, rank, name = query.question.type, query.question.node_rank, query.state.report.hostname
    if query.state.report.host != host:
        raise ConfigError(
            f"{kind!r} is registered by the script that runs, which node {name} cannot load: move its classes to a "
            f"module that can be imported there, and name that in {EXT_MODULE} if it is not on the script's path",
            path=f"{query.path}.type",
        )
    answer: concurrent.futures.Future[HardwareResource | None] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()  # a timeout cannot cancel the thread

    def ask(section: HardwareSection) -> None:
        try:
            answer.set_result(enumerate_values(kind, rank, values_of(section, rank)))
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            answer.set_exception(error)

    # a daemon thread: one that hangs delays neither this wait nor the end of the script
    exhaustion.start(threading.Thread(target=ask, args=(query.group.hardware,), name=f"look for {kind}", daemon=True))
    try:
        return await asyncio.wait_for(asyncio.wrap_future(answer), LIMIT_S)
    except asyncio.TimeoutError:
        raise ConfigError(
            f"enumerate() of {kind}, which the script registers, gave no answer for node {name} within {LIMIT_S:g} s",
            path=query.path,
        ) from None
    except ConfigError as error:
        raise section_error(error, query.group.hardware, rank, query.path, f" (on node {name})") from None


def _resource(query: _Query, answer: HardwareAnswer) -> HardwareResource | None:
    assert query.group.hardware is not None
    kind, name = query.question.type, query.state.report.hostname
    if answer.kind == "config":
        error = ConfigError(answer.text, path=answer.path)
        raise section_error(error, query.group.hardware, query.question.node_rank, query.path, f" (on node {name})")
    if answer.kind == "unregistered":
        why = f" Not loaded there: {answer.text}." if answer.text else ""
        python = query.question.interpreter or query.state.report.interpreter
        raise ConfigError(
            f"node {name} does not know hardware type {kind!r}.{why} Install the package that registers it for "
            f"{python} there, or set {EXT_MODULE} to its module for that node's agentd, or in the group's env_configs",
            path=f"{query.path}.type",
        )
    if answer.kind:
        raise ConfigError(f"node {name} cannot say which {kind} it has: {answer.text}", path=query.path)
    infos = [info_of(piece, query.path) for piece in answer.pieces]
    return HardwareResource(kind, infos) if infos else None


class NodesTable:
    """A base class of Cluster: its nodes as a table in notebooks."""

    _nodes: list[NodeInfo]

    def _repr_html_(self) -> str:
        rows = [
            (
                node.node_rank,
                node.node_ip,
                node.num_cpus,
                ", ".join(f"{len(one.infos)} {one.type}" for one in node.hardware_resources) or "none",
                node.python_interpreter_path,
            )
            for node in self._nodes
        ]
        return html_table(repr(self)[1:-1], ("rank", "address", "CPUs", "hardware", "Python"), rows)
