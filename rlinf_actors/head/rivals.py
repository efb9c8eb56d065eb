"""Rivals: agentds that say that they are a node which has an agentd already. Pure.

A hello never takes a living node over, because whoever has a copy of the node's key can send one, and incarnations are
no secret. Two things decide instead. The agentds of one run directory share a secret, which other users cannot read. An
agentd that knows it comes after the one before, which has ended, and takes its place at once. Any other agentd must
wait until the one before has said goodbye or was silent for a lease. It tries again until then, and both are told.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from rlinf_actors.head.client_ends import PING
from rlinf_actors.head.commands import Notify, Refused
from rlinf_actors.head.records import Node, NodeLife
from rlinf_actors.head.refusal_log import WINDOW_S
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import AgentHello, Beat
from rlinf_actors.wire.client_messages import Warn
from rlinf_actors.wire.program import process_text

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


LEAST_KEEP_S = 3600.0
"""Seconds for which a rotated key stays valid if its agentd lives: time in which an administrator sees the event."""


def proof_of(secret: str) -> str:
    """Return a hash of an agentd's secret, which can be kept without revealing the secret; "" for no secret."""
    return hashlib.sha256(f"rlinf-actors node\0{secret}".encode()).hexdigest() if secret else ""


def check_rival(head: Coordinator, known: Node, hello: AgentHello, proof: str) -> None:
    """Raise Refused if the agentd that has sent *hello* may not take the place of the agentd of *known* yet.

    *proof* is the hash of the secret in the hello.
    """
    if known.life is NodeLife.LOST or hello.is_head or (known.proof and hmac.compare_digest(known.proof, proof)):
        return
    there = f", {process_text(known.program, known.pid, head.wall)}" if known.pid else ""
    rival = f", {process_text(hello.program, hello.pid, head.wall)}," if hello.pid else ""
    silent = f"{head.now - known.last_seen:.1f} s ago"
    what = f"was last heard {silent}" if known.alive else f"is awaited since a head was restarted {silent}"
    if known.alive:
        head.emit(Notify(known.peer, Beat(PING)))  # its answer, or that it cannot be sent, shows whether it lives
        _warn(head, known, f"another agentd{rival} says that it is this node, {known.name}: it was refused")
    raise Refused(
        "unreachable",
        f"node {known.name} (id {known.id}) has an agentd already{there}, which {what}. Another one takes its place "
        f"when that one has stopped, or was silent for {head.timing.lease_s:g} s. If these are two nodes, give each "
        "its own --node-id",
    )


def check_only_node(head: Coordinator, hello: AgentHello, member: Member) -> None:
    """Raise Refused if the member's key speaks for another node that lives or is awaited: a key is for one node."""
    for other in head.nodes.of_member(member):
        if other.id != hello.node.node_id and other.life is not NodeLife.LOST:
            rival = f", {process_text(hello.program, hello.pid, head.wall)}," if hello.pid else ""
            said = f"an agentd{rival} says that it is node {hello.node.node_id}, by this node's key: it was refused"
            _warn(head, other, said)
            raise Refused(
                "unreachable",
                f"{member} is node {other.name} (id {other.id}) already, and a key is for one node and user: enroll "
                "this one too (`rlinf-actors keys enroll NODE --user USER` on the head's machine)",
            )


def check_rotation(head: Coordinator, member: Member, keep_s: float) -> None:
    """Raise Refused if a node of this member lives whose key would end within LEAST_KEEP_S by a rotation."""
    keys, nodes = head.keys, head.nodes.of_member(member) if member.role == "agent" else []
    for node in nodes:
        its = node.member.key
        if not node.alive or keys.limits_of(its).user != keys.limits_of(member.key).user:
            continue
        if keep_s >= LEAST_KEEP_S and its == member.key:
            continue  # a key that was replaced before ends now
        _warn(head, node, "this node's key was to be changed, and to end at once: that was refused")
        raise Refused(
            "usage",
            f"node {node.name} runs with a key that would end now, and a copy of a key must not end the node: stop its "
            f"agentd first; or keep the old key for {LEAST_KEEP_S / 3600:g} hour or more (--keep), and restart agentd "
            "before the next rotation",
        )


def _warn(head: Coordinator, node: Node, text: str) -> None:
    if node.alive and head.now - node.warned >= WINDOW_S:
        node.warned = head.now
        head.emit(Notify(node.peer, Warn(text)))
