"""A name is held while its group may still have a running worker."""

from __future__ import annotations

from head_kit import HeadKit, agent_hello, running, specs

from rlinf_actors.wire.agent_messages import Beat, Goodbye, StopWorkers
from rlinf_actors.wire.values import Endpoint, ExitReport

LEASE_S = 10.0
HOLD_S = 60.0


def cut_off() -> HeadKit:
    """Group g had a worker on n0, which lives, and one on n1, which was lost."""
    kit = HeadKit(lease_s=LEASE_S, rank_hold_s=HOLD_S)
    kit.cluster(2)
    kit.launch("g", [0, 1])
    for n in range(2):
        kit.ready(f"a:n{n}", f"g-{n}")
    alive(kit, LEASE_S + 1)
    kit.exited("a:n0", "g-0", exit_code=1)
    return kit


def alive(kit: HeadKit, seconds: float) -> None:
    """Let time pass in which n0 and the driver beat."""
    for _ in range(int(seconds)):
        kit.tell("a:n0", Beat("n0"))
        kit.tell("d1", Beat("d1"))
        kit.wait(1)


def launch(kit: HeadKit):
    return kit.launch("g", [0], launch="again")


def test_name_is_held_while_a_lost_worker_may_still_run():
    kit = cut_off()
    refused = launch(kit)
    assert refused.kind == "name_in_use"
    assert "worker g:1 of the group before, owned by a driver (pid 100 on a machine" in refused.text
    assert "was lost with node n1" in refused.text
    assert "is held for 59 s at most" in refused.text
    assert kit.launch("h", [0]).group.name == "h", "another name is free"
    alive(kit, HOLD_S - 2)
    assert launch(kit).kind == "name_in_use"
    alive(kit, 2)
    assert launch(kit).group.name == "g"


def test_name_is_free_when_the_node_returns_without_the_worker():
    kit = cut_off()
    kit.node("n1", "again", ip="10.0.0.2")
    assert launch(kit).group.name == "g"


def test_name_is_held_until_the_end_of_a_returned_worker():
    kit = cut_off()
    there = running(specs("g", [0, 1])[1], "d1", endpoint=Endpoint("h", "ipc://x"), pid=7)
    kit.ask("a:n1again", agent_hello("n1", "again", ip="10.0.0.2", workers=[there]))
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["g-1"]]
    assert launch(kit).kind == "name_in_use"
    kit.exited("a:n1again", "g-1", kind="stopped")
    assert launch(kit).group.name == "g"


def test_name_is_free_when_the_hello_reports_the_end():
    kit = cut_off()
    there = running(specs("g", [0, 1])[1], "d1", exit=ExitReport("signalled", signal=9))
    kit.ask("a:n1again", agent_hello("n1", "again", ip="10.0.0.2", workers=[there]))
    assert launch(kit).group.name == "g"


def test_name_is_free_after_the_goodbye_of_the_node():
    kit = HeadKit(lease_s=LEASE_S, rank_hold_s=HOLD_S)
    kit.cluster(2)
    kit.launch("g", [1])
    kit.tell("a:n1", Goodbye("it is switched off"))
    assert launch(kit).group.name == "g"
