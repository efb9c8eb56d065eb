"""A cluster whose head is restarted, and the nodes and clients that return."""

from __future__ import annotations

from head_kit import HeadKit, agent_hello, running, specs

from rlinf_actors.wire.client_messages import Handles, Launched
from rlinf_actors.wire.values import Endpoint, GroupHandle

UP = Endpoint("h", "ipc://x")


def cluster(nodes: int = 2, **timing: float) -> HeadKit:
    """Nodes n0, n1, … with ranks, d1's group g with a worker on each, all running."""
    kit = HeadKit(**timing)
    kit.cluster(nodes)
    assert isinstance(kit.launch("g", list(range(nodes))), Launched)
    for n in range(nodes):
        kit.ready(f"a:n{n}", f"g-{n}")
    return kit


def back(kit: HeadKit, node: int, nodes: int = 2, *more, incarnation: str = "", **fields):
    """A node's agent returns with its worker of g; *more* are fields of the worker."""
    there = [running(specs("g", list(range(nodes)))[node], "d1", endpoint=UP, pid=7, **fields), *more]
    hello = agent_hello(f"n{node}", incarnation, ip=f"10.0.0.{node + 1}", is_head=node == 0, workers=there)
    return kit.ask(f"a:n{node}{incarnation}", hello)


def alone(kit: HeadKit, node: int):
    """A node's agent returns without workers."""
    return kit.node(f"n{node}", ip=f"10.0.0.{node + 1}", is_head=node == 0)


def returns(kit: HeadKit, incarnation: str = "d1", **more):
    """A client of the earlier head returns."""
    return kit.driver(incarnation, token="token1", **more)


def handle(kit: HeadKit, nodes: int = 2, group: str = "g") -> Handles:
    """The handles that an owner reports for its group."""
    found = HeadKit()
    found.cluster(nodes)
    states = found.launch(group, list(range(nodes))).group.workers
    return Handles([GroupHandle("ns", group, states)])
