"""A rank that ended before the head's restart: its owner reports it, and later clients learn of it."""

from __future__ import annotations

from head_kit import HeadKit, agent_hello, running, specs

from rlinf_actors.wire.agent_messages import Beat
from rlinf_actors.wire.client_messages import FindGroup, Handles, WorkerChanged
from rlinf_actors.wire.values import Endpoint, ExitReport, GroupHandle, WorkerState

UP = Endpoint("h", "ipc://x")


def degraded(lease_s: float = 10) -> HeadKit:
    """A restarted head before its nodes return; the agent of g-1 no longer reports that end."""
    kit = HeadKit(lease_s=lease_s)
    kit.cluster(3)
    kit.launch("g", [0, 1, 2])
    for n in range(3):
        kit.ready(f"a:n{n}", f"g-{n}")
    kit.exited("a:n1", "g-1", exit_code=3)
    kit.restart()
    return kit


def node_returns(kit: HeadKit, node: int) -> None:
    there = [] if node == 1 else [running(specs("g", [0, 1, 2])[node], "d1", endpoint=UP, pid=7)]
    kit.ask(f"a:n{node}", agent_hello(f"n{node}", ip=f"10.0.0.{node + 1}", is_head=node == 0, workers=there))


def handles_of_owner() -> Handles:
    states = [WorkerState(f"g-{n}", n, n, f"10.0.0.{n + 1}", "running", 7, UP) for n in range(3)]
    states[1] = WorkerState("g-1", 1, 1, "10.0.0.2", "gone", exit=ExitReport("exited", 3))
    return Handles([GroupHandle("ns", "g", states)])


def states_of(workers) -> list[tuple[int, str, int | None]]:
    return [(worker.rank, worker.state, worker.exit.exit_code if worker.exit else None) for worker in workers]


WITH_ITS_END = [(0, "running", None), (1, "gone", 3), (2, "running", None)]


def test_later_client_learns_how_a_rank_ended():
    kit = degraded()
    kit.driver("d1", token="token1")
    kit.tell("d1", handles_of_owner())
    for node in range(3):
        node_returns(kit, node)
    assert (1, "gone", 3) in [end for changed in kit.sent(WorkerChanged, "d1") for end in states_of(changed.workers)]
    kit.driver("d2")
    assert states_of(kit.ask("d2", FindGroup("ns", "g")).group.workers) == WITH_ITS_END
    assert ("worker", "g-1") not in kit.disk.given_up


def test_lookup_before_the_owner_returns_reports_the_rank_too():
    kit = degraded()
    kit.driver("d2", token="token1")
    assert kit.ask("d2", FindGroup("ns", "g")) is None
    kit.driver("d1", token="token1")
    kit.tell("d1", handles_of_owner())
    for node in range(3):
        node_returns(kit, node)
    (found,) = [answer for peer, answer in kit.answers() if peer == "d2"]
    assert states_of(found.group.workers) == WITH_ITS_END


def restarted_without_owner() -> HeadKit:
    """All nodes are back and d2 has asked for the group; its owner, which alone knows of g-1, is away."""
    kit = degraded()
    for node in range(3):
        node_returns(kit, node)
    kit.driver("d2", token="token1")
    assert kit.ask("d2", FindGroup("ns", "g")) is None
    return kit


def test_lookup_after_the_nodes_return_waits_for_the_owner():
    kit = restarted_without_owner()
    kit.driver("d1", token="token1")
    assert [peer for peer, _ in kit.answers()] == ["d1"]
    kit.tell("d1", handles_of_owner())
    (found,) = [answer for peer, answer in kit.answers() if peer == "d2"]
    assert states_of(found.group.workers) == WITH_ITS_END


def test_lookup_without_the_owner_reports_every_rank():
    kit = restarted_without_owner()
    answers = []
    while not answers:
        kit.tell("d2", Beat("d2"))
        kit.wait(1)
        answers = [answer for peer, answer in kit.answers() if peer == "d2"]
    (found,) = answers
    workers = found.group.workers
    assert sorted(worker.rank for worker in workers) == [0, 1, 2]
    (absent,) = [worker for worker in workers if worker.rank == 1]
    assert "no node had it when the head was restarted" in absent.exit.reason


def test_group_on_no_node_ends_as_its_owner_reports():
    kit = degraded()
    for node in range(3):
        kit.node(f"n{node}", ip=f"10.0.0.{node + 1}", is_head=node == 0)
    kit.driver("d1", token="token1")
    kit.tell("d1", handles_of_owner())
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert [worker.state for worker in changed.workers] == ["gone"] * 3
    assert changed.workers[1].exit == ExitReport("exited", 3)
