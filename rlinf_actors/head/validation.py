"""Checks of the content of messages, before the head uses, stores or forwards it. Pure.

The limits keep one message from filling the event log or the head's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from rlinf_actors.head.commands import Refused
from rlinf_actors.head.records import Client, Node
from rlinf_actors.wire.agent_messages import AgentHello, WorkersHealth
from rlinf_actors.wire.client_messages import Launch
from rlinf_actors.wire.protocol import printable
from rlinf_actors.wire.values import ExitReport, WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.head.node_table import NodeTable


def check_workers(asked: Launch, taken: Callable[[str], bool]) -> None:
    """Raise Refused if the ids, ranks or names of a launch's workers are not consistent.

    *taken* returns True if a worker of another group has this id.
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
"""The first protocol version whose agentds keep the workers of a group without an owner."""
NAME_CHARS = 256
REPORT_BYTES = 1 << 20
MAX_WORKERS_OF_NODE = 10_000
"""Largest number of workers, and of watched processes, that an agentd may report."""


def check_names(**names: str) -> None:
    """Raise Refused if a name has more than NAME_CHARS characters. The error text calls it by its keyword."""
    for what, name in names.items():
        if len(name) > NAME_CHARS:
            raise Refused(
                "usage", f"the {what.replace('_', ' ')} {name[:20]!r}... has more than {NAME_CHARS} characters"
            )


def check_agent(hello: AgentHello) -> None:
    """Raise Refused if an agentd's report on its node is longer than REPORT_BYTES or lists too many processes.

    The report is stored and sent to every driver.
    """
    report = hello.node
    check_names(incarnation=hello.incarnation)
    check_names(node_id=report.node_id, hostname=report.hostname, ip=report.ip, host=report.host)
    size = len(msgspec.msgpack.encode(report))
    if size > REPORT_BYTES:
        raise Refused("usage", f"node {report.node_id} describes itself in {size} bytes; at most {REPORT_BYTES}")
    if max(len(hello.workers), len(hello.watched), len(hello.ended)) > MAX_WORKERS_OF_NODE:
        raise Refused("usage", f"node {report.node_id} has more than {MAX_WORKERS_OF_NODE} workers, or drivers")


def check_outlives(asked: Launch, client: Client, embedded: bool, nodes: Iterable[Node]) -> None:
    """Raise Refused if this group cannot be launched detached by *client* on these *nodes*.

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
    for node in nodes:
        if node.protocol < DETACHES:
            raise Refused(
                "usage", f"{name}: the agentd of node {node.name} is an older version that ends it: upgrade that first"
            )


def own_namespace(client: Client, namespace: str) -> None:
    """Raise Refused if *namespace*, which a client's request names, is not the client's own."""
    if client.namespace != namespace:
        raise Refused(
            "authentication",
            f"this {client.role} belongs to namespace {client.namespace!r} and asks about {namespace!r}",
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


TAIL_LINES, TAIL_LINE_CHARS = 20, 4097
"""Largest number of lines, and of characters in a line, of a worker's stderr in an exit report (template.log_pump)."""
REASON_CHARS = 16384
"""Largest length of the reason in an exit report, which may be the traceback of a failed import."""


def exit_report(said: ExitReport) -> ExitReport:
    """Return an exit report with stderr lines and reason cut to their limits, and with printable kind and oom texts."""
    tail = [line[:TAIL_LINE_CHARS] for line in said.stderr_tail[-TAIL_LINES:]]
    reason = said.reason[:REASON_CHARS]
    return ExitReport(printable(said.kind), said.exit_code, said.signal, printable(said.oom), tail, reason)


def hello(said: AgentHello) -> AgentHello:
    """Return an agentd's hello with the exit reports and end reasons of workers cut to their limits."""
    workers = [one if one.exit is None else replace(one, exit=exit_report(one.exit)) for one in said.workers]
    return replace(said, workers=workers, ended={id: why[:REASON_CHARS] for id, why in said.ended.items()})


def health(said: WorkersHealth) -> WorkersHealth:
    """Return a health report with printable texts."""
    return WorkersHealth(
        [replace(one, unresponsive=printable(one.unresponsive), method=printable(one.method)) for one in said.workers]
    )
