"""Start relays for large groups: which nodes get one, and their launch. Loop thread.

A group that has many ranks on other nodes is called by relays (`net.relay_path`, `worker.relay`): one process of the
job on each node where the group has FEW ranks or more, on which the launching process has launched it, like the hosts
of channels. The relays start beside the group, each as a group of its own, and the group's links to a node wait for its
relay. If that does not come up within WAIT_S, links to its node are direct.

There is no relay on nodes of versions that have none, and none for a group that holds a robot: one process more, whose
standstill is noticed late, must not stand between a robot and its caller.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import uuid
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlinf_actors.cluster.service import launch_service
from rlinf_actors.errors import GroupClosedError, RlinfActorsError
from rlinf_actors.net import fault_injection
from rlinf_actors.net.loop import Tasks
from rlinf_actors.runtime.node_relays import NodeRelays
from rlinf_actors.settings import Settings
from rlinf_actors.wire.values import RELAY_GROUPS, WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.runtime.remote_group import RemoteGroup

log = logging.getLogger(__name__)

HOST = "rlinf_actors.worker.relayhost:RelayHost"
FEW = 8
"""Ranks of a group on a node from which the node gets a relay."""
WAIT_S = 30.0
"""Seconds that links wait for a relay."""

_relays: weakref.WeakKeyDictionary[Cluster, _Relays] = weakref.WeakKeyDictionary()


def use(cluster: Cluster, group: RemoteGroup, workers: Sequence[WorkerSpec]) -> None:
    """Let *group* be called by relays where that is faster. Call it before the group is launched."""
    settings = Settings.load()
    least = settings.relay_from
    if len(workers) < max(least, 1) or not least or settings.local_link != "unix":
        return
    runtime = cluster.runtime
    if runtime.emulated is not None or fault_injection.active is not None:
        return  # both look at each link
    if any(spec.claims for spec in workers):
        return
    others = {state.rank for state in cluster._states if state.report.host != runtime.host}
    counts = collections.Counter(spec.node_rank for spec in workers if spec.node_rank in others)
    nodes = [node for node, count in counts.items() if count >= FEW]
    if sum(counts[node] for node in nodes) < least:
        return
    found = _relays.get(cluster)
    if found is None:
        found = _relays[cluster] = _Relays(cluster)
    found.start(node for node in nodes if not found.paths.knows(node))
    group.relays = found.paths


class _Relays:
    """The relays that this process has launched."""

    def __init__(self, cluster: Cluster) -> None:
        self.paths = NodeRelays()
        self._cluster = weakref.ref(cluster)
        self._id = uuid.uuid4().hex[:6]
        self._tasks = Tasks()

    def start(self, nodes: Iterable[int]) -> None:
        cluster = self._cluster()
        if cluster is None:
            return
        for node in nodes:
            self.paths.begin(node)
            self._tasks.start(self._start(cluster, node), f"starting the relay on node {node}")

    async def _start(self, cluster: Cluster, node: int) -> None:
        late = asyncio.get_running_loop().call_later(WAIT_S, self._late, node)
        try:
            group = await launch_service(cluster, f"{RELAY_GROUPS}{self._id}-{node}", HOST, (), [node])
            await group.ready
        except GroupClosedError as error:  # this process ends
            log.info("the relay on node %d is not used: %s", node, error)
        except RlinfActorsError as error:
            log.warning("the workers on node %d are called without a relay, which is slower: %s", node, error)
        else:
            self.paths.ready(node, group.peers[0])
        finally:
            late.cancel()
            self.paths.give_up(node)

    def _late(self, node: int) -> None:
        text = "the workers on node %d are called without a relay, which is slower: it has not started within %g s"
        log.warning(text, node, WAIT_S)
        self.paths.give_up(node)
