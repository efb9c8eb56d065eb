"""A rank that had ended before the head was restarted: its owner tells of it, and whoever attaches hears of it."""

from __future__ import annotations

from head_kit import HeadKit, agent_hello, running, specs

from rlinf_actors.wire.agent_messages import Beat
from rlinf_actors.wire.client_messages import FindGroup, Handles, WorkerChanged
from rlinf_actors.wire.values import Endpoint, ExitReport, GroupHandle, WorkerState

UP = Endpoint("h", "ipc://x")


def degraded(lease_s: float = 10) -> HeadKit:
    """A head that was restarted; no node is back yet, and the agent of g-1 has been told that its end is known."""
    kit = HeadKit(lease_s=lease_s)
    kit.cluster(3)
    kit.launch("g", [0, 1, 2])
    for n in range(3):
        kit.ready(f"a:n{n}", f"g-{n}")
    kit.exited("a:n1", "g-1", exit_code=3)
    kit.restart()
    return kit


def back(kit: HeadKit, node: int) -> None:
    there = [] if node == 1 else [running(specs("g", [0, 1, 2])[node], "d1", endpoint=UP, pid=7)]
    kit.ask(f"a:n{node}", agent_hello(f"n{node}", ip=f"10.0.0.{node + 1}", is_head=node == 0, workers=there))


def owner_tells() -> Handles:
    states = [WorkerState(f"g-{n}", n, n, f"10.0.0.{n + 1}", "running", 7, UP) for n in range(3)]
    states[1] = WorkerState("g-1", 1, 1, "10.0.0.2", "gone", exit=ExitReport("exited", 3))
    return Handles([GroupHandle("ns", "g", states)])


def ends(workers) -> list[tuple[int, str, int | None]]:
    return [(worker.rank, worker.state, worker.exit.exit_code if worker.exit else None) for worker in workers]


WITH_ITS_END = [(0, "running", None), (1, "gone", 3), (2, "running", None)]


def test_client_that_attaches_later_hears_how_a_rank_ended():
    kit = degraded()
    kit.driver("d1", token="token1")
    kit.tell("d1", owner_tells())
    for node in range(3):
        back(kit, node)
    assert (1, "gone", 3) in [end for changed in kit.sent(WorkerChanged, "d1") for end in ends(changed.workers)]
    kit.driver("d2")
    assert ends(kit.ask("d2", FindGroup("ns", "g")).group.workers) == WITH_ITS_END
    assert ("worker", "g-1") not in kit.disk.given_up


def test_lookup_before_the_owner_returns_reports_the_rank_too():
    kit = degraded()
    kit.driver("d2", token="token1")
    assert kit.ask("d2", FindGroup("ns", "g")) is None
    kit.driver("d1", token="token1")
    kit.tell("d1", owner_tells())
    for node in range(3):
        back(kit, node)
    (found,) = [answer for peer, answer in kit.answers() if peer == "d2"]
    assert ends(found.group.workers) == WITH_ITS_END


def owner_is_last() -> HeadKit:
    """All nodes are back, somebody has asked for the group, and its owner, who alone knows of g-1, is still away."""
    kit = degraded()
    for node in range(3):
        back(kit, node)
    kit.driver("d2", token="token1")
    assert kit.ask("d2", FindGroup("ns", "g")) is None
    return kit


def test_lookup_after_the_nodes_return_waits_for_the_owner():
    kit = owner_is_last()
    kit.driver("d1", token="token1")
    assert [peer for peer, _ in kit.answers()] == ["d1"]
    kit.tell("d1", owner_tells())
    (found,) = [answer for peer, answer in kit.answers() if peer == "d2"]
    assert ends(found.group.workers) == WITH_ITS_END


def test_lookup_without_the_owner_reports_every_rank():
    kit = owner_is_last()
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


def test_group_that_no_node_has_ends_as_its_owner_says():
    kit = degraded()
    for node in range(3):
        kit.node(f"n{node}", ip=f"10.0.0.{node + 1}", is_head=node == 0)
    kit.driver("d1", token="token1")
    kit.tell("d1", owner_tells())
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert [worker.state for worker in changed.workers] == ["gone"] * 3
    assert changed.workers[1].exit == ExitReport("exited", 3)
