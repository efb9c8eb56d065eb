"""Checks of the content of messages, before the head uses, stores or forwards it. Pure.

The lengths of single values are bounded before, while a message is decoded (wire.bounds).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from rlinf_actors.head.commands import Refused
from rlinf_actors.head.records import Client, Node
from rlinf_actors.head.slices import PIECE, Sliced, pieces
from rlinf_actors.model.names import wrong_name
from rlinf_actors.wire.agent_messages import AgentHello
from rlinf_actors.wire.client_messages import Launch
from rlinf_actors.wire.endings import REASON_CHARS, cut
from rlinf_actors.wire.protocol import printable
from rlinf_actors.wire.values import ExitReport, WorkerHealth, WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.head.node_table import NodeTable


def check_workers(asked: Launch, taken: Callable[[str], bool]) -> Sliced[None]:
    """Raise Refused if the ids, ranks or names of a launch's workers are not consistent.

    *taken* returns True if a worker of another group has this id.
    """
    if not asked.workers:
        raise Refused("usage", f"group {asked.group!r} has no workers")
    ids: set[str] = set()
    ranks: set[int] = set()
    for some, more in pieces(asked.workers, 10 * PIECE):
        for spec in some:
            if spec.id in ids or taken(spec.id) or not spec.id:
                raise Refused("usage", f"the workers' ids of group {asked.group!r} are not unique")
            if spec.rank in ranks or not 0 <= spec.rank < len(asked.workers):
                raise Refused("usage", f"the ranks of group {asked.group!r} are not 0 to {len(asked.workers) - 1}")
            if (spec.namespace, spec.group) != (asked.namespace, asked.group):
                raise Refused("usage", f"worker {spec.id} of group {asked.group!r} says that it is {spec.group!r}'s")
            ids.add(spec.id)
            ranks.add(spec.rank)
        if more:
            yield


REPORT_BYTES = 1 << 16
"""Most bytes of an agentd's report on its node. A status has those of all nodes, and 64 lost ones of each key."""


def check_agent(hello: AgentHello) -> None:
    """Raise Refused if an agentd's report on its node has a wrong name, or is longer than REPORT_BYTES.

    The report is stored and sent to every driver.
    """
    report = hello.node
    if wrong := wrong_name(report.hostname, "a node"):
        raise Refused("usage", wrong)
    size = len(msgspec.msgpack.encode(report))
    if size > REPORT_BYTES:
        raise Refused("usage", f"node {report.node_id} describes itself in {size} bytes; at most {REPORT_BYTES}")


def check_outlives(asked: Launch, client: Client, embedded: bool) -> None:
    """Raise Refused if this group cannot be launched detached by *client*.

    *embedded* is True if the head belongs to one driver and ends with it.
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


def own_namespace(client: Client, namespace: str) -> None:
    """Raise Refused if *namespace*, which a client's request names, is not the client's own."""
    if client.namespace != namespace:
        raise Refused(
            "authentication",
            f"this {client.role} belongs to job {client.namespace!r} and asks about {namespace!r}",
        )


def node_for(spec: WorkerSpec, nodes: NodeTable) -> Node:
    """Return the node on which a worker was placed; raise Refused if the node cannot take workers now."""
    node = nodes.of_rank(spec.node_rank)
    where = f"node {spec.node_rank}, where {spec.group}:{spec.rank} was placed,"
    if node is None:
        raise Refused("node_lost", f"{where} is not there (any more)")
    if node.draining:
        raise Refused("placement", f"{where} is {node.name}, and that is {node.condition}: place the group elsewhere")
    if not node.usable:
        raise Refused("node_lost", f"{where} ({node.name}) is {node.condition}")
    return node


def exit_report(said: ExitReport) -> ExitReport:
    """Return an exit report with stderr lines and reason cut to their limits, and with printable kind and oom texts."""
    return replace(cut(said), kind=printable(said.kind), oom=printable(said.oom))


def hello(said: AgentHello) -> AgentHello:
    """Return an agentd's hello with the end reasons of workers cut to their limits."""
    return replace(said, ended={id: why[:REASON_CHARS] for id, why in said.ended.items()})


def health(said: WorkerHealth) -> WorkerHealth:
    """Return a report on a worker's health with printable texts."""
    return replace(
        said,
        unresponsive=printable(said.unresponsive),
        method=printable(said.method),
        breakpoint=printable(said.breakpoint),
    )
