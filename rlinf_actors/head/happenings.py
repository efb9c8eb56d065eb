"""What the event log says of nodes, clients, groups and workers. Pure."""

from __future__ import annotations

import logging

import msgspec

from rlinf_actors.head.commands import Record
from rlinf_actors.head.records import Client, Group, Node, Worker
from rlinf_actors.head.transitions import WorkerLife
from rlinf_actors.wire.bounds import printable
from rlinf_actors.wire.endings import ending, orderly
from rlinf_actors.wire.values import EventKind

ERRORS = frozenset({"robot_conflict"})
"""Kinds of events that need a person."""
WARNINGS = frozenset({"node_lost", "worker_died", "lease_lost", "estop", "estop_released", "refused", "events_missing"})
"""Kinds of events that are no part of an orderly life."""


def level(kind: str) -> int:
    """Return the level at which the head logs an event of *kind*."""
    if kind in ERRORS:
        return logging.ERROR
    return logging.WARNING if kind in WARNINGS else logging.INFO


def of_node(kind: EventKind, node: Node, text: str) -> Record:
    """*text* follows the node's name."""
    return Record(kind, f"node {node.name} {text}", node=node.report.hostname, node_id=node.id)


def of_driver(kind: EventKind, client: Client, text: str) -> Record:
    """*text* follows what the driver is called."""
    return Record(kind, f"{client} {text}", namespace=client.namespace, pid=client.pid)


def of_group(kind: EventKind, group: Group, text: str) -> Record:
    """*text* follows the group's name."""
    name = f"group {group.name!r} of namespace {group.namespace!r}"
    return Record(kind, f"{name} {text}", namespace=group.namespace, group=group.name)


def of_worker(kind: EventKind, worker: Worker, node: str, text: str) -> Record:
    """*text* follows the worker's name; *node* is the name of its node."""
    spec = worker.spec
    process = f" (process {worker.pid})" if worker.pid else ""
    return Record(
        kind,
        f"worker {spec.group}:{spec.rank}{process} on node {node} {text}",
        node=node,
        node_id=worker.node_id,
        namespace=spec.namespace,
        group=spec.group,
        rank=spec.rank,
        worker_id=worker.id,
        pid=worker.pid,
        exit=worker.exit,
    )


def of_life(worker: Worker, before: WorkerLife, node: str) -> Record | None:
    """What a step of a worker's life is; None for one that is no news."""
    if worker.life is WorkerLife.RUNNING and before is WorkerLife.STARTING:
        if worker.spec.incarnation:
            return of_worker("worker_restarted", worker, node, f"is up again, restart {worker.spec.incarnation}")
        return of_worker("worker_started", worker, node, "is up")
    if not worker.gone or worker.exit is None:
        return None
    if worker.exit.kind == "stopped":
        why = f": {worker.exit.reason}" if worker.exit.reason else ""
        return of_worker("worker_stopped", worker, node, f"was stopped{why}")
    if orderly(worker.spec.group, worker.exit):
        return of_worker("worker_stopped", worker, node, "has ended: its channel was closed")
    return of_worker("worker_died", worker, node, ending(worker.exit))


def of_end(group: Group) -> Record:
    """All workers of a group are gone."""
    died = [w for w in group.workers.values() if w.exit is not None and not orderly(group.name, w.exit)]
    count = len(group.workers)
    how = f"{len(died)} of its {count} workers died" if died else f"its workers ({count}) were stopped"
    return of_group("group_ended", group, f"has ended; {how}")


NAME_CHARS = 200


def shown(record: Record) -> Record:
    """An entry of the log as it may be kept and shown."""
    fields = ("node", "node_id", "namespace", "group", "worker_id")
    names = {name: printable(getattr(record, name), NAME_CHARS) for name in fields}
    return msgspec.structs.replace(record, text=printable(record.text), **names)
