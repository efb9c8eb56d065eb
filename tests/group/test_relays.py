"""Which nodes get a relay: never for robots, never on nodes of versions without relays; each starts by itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rlinf_actors.errors import WorkerStartError
from rlinf_actors.group import relays
from rlinf_actors.wire.values import Claim, WorkerSpec

HERE = "this machine"


class FakeCluster:
    """Nodes 0 (this machine), 1 and 2."""

    def __init__(self) -> None:
        self.runtime = SimpleNamespace(emulated=None, host=HERE)
        self._states = [
            SimpleNamespace(rank=rank, report=SimpleNamespace(host=f"h{rank}" if rank else HERE)) for rank in range(3)
        ]


class FakeLaunch:
    """Starts relays; on the nodes in `broken` that fails, and on those in `hanging` it does not end."""

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self.names: set[str] = set()
        self.broken: set[int] = set()
        self.hanging: set[int] = set()

    async def __call__(self, cluster, name, reference, args, nodes):
        (node,) = nodes
        self.nodes.append(node)
        self.names.add(name)
        if node in self.broken:
            raise WorkerStartError("no module named rlinf_actors.worker.relayhost")
        if node in self.hanging:
            await asyncio.Event().wait()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        peer = SimpleNamespace(carry=lambda number, path: None, error=None)
        return SimpleNamespace(ready=ready, peers=[peer])


@pytest.fixture
def launched(monkeypatch):
    made = FakeLaunch()
    monkeypatch.setenv("RLINF_ACTORS_RELAY_FROM", "8")
    monkeypatch.setattr(relays, "launch_service", made)
    return made


def specs(*nodes: int, claims: tuple[Claim, ...] = ()) -> list[WorkerSpec]:
    """Eight workers on each of *nodes*; the last one has *claims*."""
    placed = [node for node in nodes for _ in range(relays.FEW)]
    return [
        WorkerSpec(f"l-{rank}", "g", "ns", rank, len(placed), node, {}, claims=claims if rank == 0 else ())
        for rank, node in enumerate(placed)
    ]


async def used(workers) -> SimpleNamespace:
    group, cluster = SimpleNamespace(relays=None), FakeCluster()
    relays.use(cluster, group, workers)
    for _ in range(5):
        await asyncio.sleep(0)
    group.cluster = cluster
    return group


async def test_nodes_of_other_machines_with_this_version_get_a_relay_of_their_own(launched):
    group = await used(specs(0, 1, 2, 3))
    assert sorted(launched.nodes) == [1, 2]
    assert len(launched.names) == 2
    assert group.relays.path(1) is not None
    assert group.relays.path(3) is None
    assert not group.relays.waits(3, print)


async def test_node_whose_relay_does_not_start_keeps_no_other_node_from_its_own(launched, caplog):
    launched.broken, launched.hanging = {1}, {2}
    group = await used(specs(1, 2))
    assert group.relays.path(1) is None
    assert not group.relays.waits(1, print), "its links do not wait for the relay of another node"
    assert group.relays.waits(2, print)
    assert "the workers on node 1 are called without a relay, which is slower" in caplog.text


async def test_group_that_holds_a_robot_has_no_relay(launched):
    group = await used(specs(1, 2, claims=(Claim("arm", "the arm"),)))
    assert group.relays is None
    assert launched.nodes == []
