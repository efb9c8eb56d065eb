"""Who may launch on which node: by the node's own rules, and by the limits of the driver's key. Pure.

A launch, ranks that are added, a restart, and a question that makes a node run code or send traces are checked here.
The agentd of the node checks its own rules again (agentd.workers).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rlinf_actors.head.commands import Refused
from rlinf_actors.head.records import Client, Group, Node, WorkerRecord
from rlinf_actors.security.members import Member
from rlinf_actors.wire.launch_rules import Launcher, LaunchRules
from rlinf_actors.wire.values import NodeState, WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

_OPEN = LaunchRules()


class Admission:
    def __init__(self, head: Coordinator) -> None:
        self._head = head

    def launcher(self, namespace: str, nested: bool) -> Launcher:
        """Return who launches in a job; *nested* is True if a worker of the job asks."""
        driver = self._head.jobs.owner_of(namespace)
        return Launcher(driver, self._head.keys.driver_limits(driver).groups, nested)

    def of_group(self, group: Group) -> Launcher:
        """Return who has launched a group."""
        owner = self._head.clients.get(group.owner)
        return self.launcher(group.namespace, group.nested or (owner is not None and owner.role == "worker"))

    def of_member(self, member: Member) -> Launcher | None:
        """Return as whom a member without a session would launch; None for a member that launches nothing."""
        if member.role == "worker":
            return self.launcher(member.job, True)
        if member.role not in ("driver", "local"):
            return None
        name = member.name if member.role == "driver" else ""
        return Launcher(name, self._head.keys.driver_limits(name).groups)

    def why_not(self, node: Node, launcher: Launcher, robots: bool = False) -> str:
        """Return why *launcher* may not launch a worker on a node, with the rule and advice; "" if it may.

        *robots* is True for a worker that holds robots.
        """
        patterns = self._head.keys.driver_limits(launcher.driver).nodes
        if patterns and not _is_named(node, patterns):
            return (
                f"node {node.report.hostname} is none of the nodes that the key of {launcher} is limited to "
                f"({', '.join(map(repr, patterns))}): launch on one of these, or have the key replaced "
                f"(`rlinf-actors keys enroll {launcher.driver} --driver --replace --nodes PATTERN`)"
            )
        rules = node.report.admit
        return rules.why_not(node.report.hostname, launcher, robots) if rules != _OPEN else ""

    def check(self, client: Client, node: Node, spec: WorkerSpec) -> None:
        """Raise Refused if *client* may not launch the worker *spec* on *node*, and log the refusal."""
        self.refuse(client.member, self.why_not(node, self._launcher_of(client), bool(spec.claims)))

    def check_question(self, member: Member, node_id: str) -> None:
        """Raise Refused if *member* may not have this node run code of its job or send its traces."""
        node, launcher = self._head.nodes.get(node_id), self.of_member(member)
        if node is not None and launcher is not None:
            self.refuse(member, self.why_not(node, launcher))

    def refuse(self, member: Member, why: str) -> None:
        if why:
            self._head.refusals.note(str(member), "admission", f"refused {member}: {why}")
            raise Refused("authentication", why, logged=False)

    def may_restart(self, node: Node, group: Group, worker: WorkerRecord) -> str:
        """Return why a worker may not be started again on its node, "" if it may. A refusal is logged."""
        why = self.why_not(node, self.of_group(group), bool(worker.spec.claims))
        if why:
            who = f"group {group.name!r} of job {group.namespace!r}"
            self._head.refusals.note(who, "admission", f"refused to start {worker.id} of {who} again: {why}")
        return why

    def shown(self, states: Sequence[NodeState], client: Client | None, member: Member) -> list[NodeState]:
        """Return *states* with the reason where a client, or a *member* without a session, may not launch."""
        launcher = self._launcher_of(client) if client is not None else self.of_member(member)
        if launcher is None:
            return list(states)
        found = []
        for state in states:
            node = self._head.nodes.get(state.report.node_id)
            closed = self.why_not(node, launcher) if node is not None else ""
            found.append(replace(state, closed=closed) if closed else state)
        return found

    def _launcher_of(self, client: Client) -> Launcher:
        return self.launcher(client.namespace, client.role == "worker")


def _is_named(node: Node, patterns: Sequence[str]) -> bool:
    """Return True if a pattern fits the node's name or id, or, with "=", one of its labels as LABEL=VALUE.

    A node with a key has the name of its key: it cannot choose a name that a pattern fits.
    """
    names = [node.member.name] if node.member.role == "agent" else [node.report.hostname, node.id]
    labels = [f"{name}={value}" for name, value in node.report.labels.items()]
    return any(
        fnmatch.fnmatchcase(one, pattern) for pattern in patterns for one in (labels if "=" in pattern else names)
    )
