"""The effect of silence on a client: silence of its node or connection, and stalls of the head."""

from __future__ import annotations

from head_kit import HeadKit

from rlinf_actors.wire.agent_messages import Beat, Goodbye, StartWorkers


def test_driver_on_a_lost_node_ends_with_the_nodes_lease():
    kit = HeadKit(lease_s=10)
    kit.node("n0")
    kit.driver("d2", host="host-n0")
    kit.tell("d2", Beat("d2"))
    kit.wait(9.9)
    assert kit.clients() == 1
    kit.wait(0.1)
    assert kit.clients() == 0
    assert kit.sent(Goodbye, "d2") == [
        Goodbye("the head has given up on this process: it was silent for 10 s", lost=True)
    ]


def test_beating_driver_outlives_its_killed_agent():
    kit = HeadKit(lease_s=10)
    kit.node("n0")
    kit.driver("d2", host="host-n0")
    for _ in range(12):
        kit.wait(1)
        kit.tell("d2", Beat("d2"))
    assert kit.node_states() == {"n0": "lost"}
    assert kit.clients() == 1


def test_stalled_head_reads_waiting_messages_before_it_ends_leases():
    kit = HeadKit(lease_s=10, beat_s=1.0)
    kit.driver("d1")
    kit.wait(5)
    kit.stall(25)  # the timer was due at 10, so the head knows of 20 of the 30 s of its stall
    assert kit.clients() == 1
    kit.wait(6.9)
    assert kit.clients() == 1


def test_silent_worker_is_not_declared_lost():
    kit = HeadKit(lease_s=10)
    kit.cluster()
    kit.launch("g", [0])
    (start,) = kit.sent(StartWorkers)
    kit.driver("w", role="worker", worker_id="g-0", token=start.workers[0].token)
    for _ in range(30):
        kit.wait(1)
        kit.tell("a:n0", Beat("n0-1"))
        kit.tell("d1", Beat("d1"))
    assert kit.clients() == 2


def worker_with_a_child(kit: HeadKit) -> None:
    kit.cluster()
    kit.launch("g", [0])
    (start,) = kit.sent(StartWorkers)
    token = start.workers[0].token
    kit.driver("w", role="worker", worker_id="g-0", token=token)
    kit.driver("c", role="worker", worker_id="g-0_0", parent="g-0", token=token)


def test_worker_that_is_lost_with_its_node_is_told_because_it_may_run():
    """It sends no heartbeats, so it would not learn it otherwise while its agentd stands still."""
    kit = HeadKit(lease_s=10)
    worker_with_a_child(kit)
    for _ in range(10):
        kit.tell("d1", Beat("d1"))
        kit.wait(1)
    assert kit.node_states() == {"n0": "lost"}
    for client in ("w", "c"):
        (said,) = kit.sent(Goodbye, client)
        assert said.lost
        assert "it was silent for 10 s" in said.reason


def test_worker_that_has_ended_is_told_nothing():
    kit = HeadKit(lease_s=10)
    worker_with_a_child(kit)
    kit.exited("a:n0", "g-0", kind="signalled", signal=9)
    assert kit.clients() == 1
    assert not kit.sent(Goodbye)


def test_suspect_node_is_ready_after_it_reconnects():
    kit = HeadKit(lease_s=10)
    kit.node("n0")
    kit.wait(5)
    assert kit.node_states() == {"n0": "suspect"}
    kit.node("n0")
    assert kit.node_states() == {"n0": "ready"}
    assert any("is heard again after 5.0 s" in line for line in kit.records())
