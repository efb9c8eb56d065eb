"""What the head checks of a request before it acts on it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from rlinf_actors.head.commands import Refused
from rlinf_actors.head.records import Client, Node
from rlinf_actors.wire.clients import Launch
from rlinf_actors.wire.session import AgentHello
from rlinf_actors.wire.values import WorkerSpec


def check_launch(asked: Launch, taken: Callable[[str], bool], by_rank: Mapping[int, Node]) -> None:
    """Refuse a launch that makes no sense.

    Args:
        asked: the launch.
        taken: whether a worker's id is another group's.
        by_rank: living nodes by their ranks.

    Raises:
        Refused: says what does not fit, or which node is not there.
    """
    check_workers(asked, taken)
    for spec in asked.workers:
        node_for(spec, by_rank)


def check_workers(asked: Launch, taken: Callable[[str], bool]) -> None:
    """Refuse workers that make no sense, wherever they are to run; arguments as of `check_launch`.

    Raises:
        Refused: says what does not fit.
    """
    ids = {spec.id for spec in asked.workers}
    check_names(group=asked.group, class_name=asked.cls, worker_id=max(ids, key=len, default=""))
    if not asked.workers:
        raise Refused("usage", f"group {asked.group!r} has no workers")
    if len(ids) != len(asked.workers) or any(map(taken, ids)) or "" in ids:
        raise Refused("usage", f"the workers' ids of group {asked.group!r} are not unique")
    if sorted(spec.rank for spec in asked.workers) != list(range(len(asked.workers))):
        raise Refused("usage", f"the ranks of group {asked.group!r} are not 0 to {len(asked.workers) - 1}")
    for spec in asked.workers:
        if (spec.namespace, spec.group) != (asked.namespace, asked.group):
            raise Refused("usage", f"worker {spec.id} of group {asked.group!r} says that it is {spec.group!r}'s")


DETACHES = 7
"""The first protocol whose agents keep a group that no client owns."""
NAME_CHARS = 256
REPORT_BYTES = 1 << 20
MAX_WORKERS_OF_NODE = 10_000
"""Workers and watched processes that an agent may have: more than a machine's process ids allow by default."""


def check_names(**names: str) -> None:
    """Refuse names of more than NAME_CHARS characters: they are kept, in the head's file too, and shown.

    Raises:
        Refused: says which.
    """
    for what, name in names.items():
        if len(name) > NAME_CHARS:
            raise Refused(
                "usage", f"the {what.replace('_', ' ')} {name[:20]!r}... has more than {NAME_CHARS} characters"
            )


def check_agent(hello: AgentHello) -> None:
    """Refuse an agent that says more of its node than REPORT_BYTES, which are kept and told to every driver, or that
    has more processes than a node can have.

    Raises:
        Refused: says how much it is.
    """
    report = hello.node
    check_names(incarnation=hello.incarnation)
    check_names(node_id=report.node_id, hostname=report.hostname, ip=report.ip, host=report.host)
    size = len(msgspec.msgpack.encode(report))
    if size > REPORT_BYTES:
        raise Refused("usage", f"node {report.node_id} describes itself in {size} bytes; at most {REPORT_BYTES}")
    if max(len(hello.workers), len(hello.watched), len(hello.ended)) > MAX_WORKERS_OF_NODE:
        raise Refused("usage", f"node {report.node_id} has more than {MAX_WORKERS_OF_NODE} workers, or drivers")


def check_outlives(asked: Launch, client: Client, embedded: bool, by_rank: Mapping[int, Node]) -> None:
    """Refuse a launch of a group that is to be detached where that cannot be.

    Raises:
        Refused: says why not.
    """
    name = f"group {asked.group!r} cannot be detached"
    if embedded and client.role == "driver":
        raise Refused("usage", f"{name}: this cluster is the driver's own, and ends with it")
    if any(spec.claims for spec in asked.workers):
        raise Refused("usage", f"{name}: it holds robots, and whoever moves them must be there")
    if any(spec.restart is not None for spec in asked.workers):
        raise Refused(
            "usage", f"{name}: its workers are to be started again, which takes an owner that constructs them"
        )
    for node in (by_rank.get(spec.node_rank) for spec in asked.workers):
        if node is not None and node.protocol < DETACHES:
            raise Refused(
                "usage", f"{name}: the agentd of node {node.name} is an older version that ends it: upgrade that first"
            )


def own_namespace(client: Client, namespace: str) -> None:
    """Refuse what a client asks about a job that is not its own.

    Raises:
        Refused: it belongs to another namespace.
    """
    if client.namespace != namespace:
        raise Refused(
            "authentication",
            f"this {client.role} belongs to namespace {client.namespace!r} and asks about {namespace!r}",
        )


def node_for(spec: WorkerSpec, by_rank: Mapping[int, Node]) -> Node:
    """The node that a worker was placed on.

    Raises:
        Refused: it is not there, or cannot be used.
    """
    node = by_rank.get(spec.node_rank)
    where = f"node {spec.node_rank}, where {spec.group}:{spec.rank} was placed,"
    if node is None:
        raise Refused("node_lost", f"{where} is not there (any more)")
    if node.draining:
        raise Refused("placement", f"{where} is {node.name}, and that is {node.condition}: place the group elsewhere")
    if not node.usable:
        raise Refused("node_lost", f"{where} ({node.name}) is {node.condition}")
    return node
