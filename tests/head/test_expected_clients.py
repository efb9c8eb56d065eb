"""Silent clients during a restart of the head: the head waits for clients that an agent watches."""

from __future__ import annotations

import pytest
from head_kit import HeadKit, agent_hello, running, specs

from rlinf_actors.head.commands import Refuse
from rlinf_actors.wire.agent_messages import (
    AgentHello,
    Beat,
    Goodbye,
    ProcessGone,
    StopWorkers,
    Unwatch,
    Watch,
    Welcome,
)
from rlinf_actors.wire.client_messages import ClientGone, WatchClients
from rlinf_actors.wire.values import Endpoint

UP = Endpoint("h", "ipc://x")


def hello(*watched: str, incarnation: str = "") -> AgentHello:
    there = [running(specs("g", [0])[0], "d1", endpoint=UP, pid=7)]
    made = agent_hello("n0", incarnation, ip="10.0.0.1", is_head=True, workers=there)
    return AgentHello(
        made.protocol, made.version, made.incarnation, made.node, made.is_head, made.workers, watched=list(watched)
    )


def restarted(*watched: str) -> HeadKit:
    """d1's group g runs on n0; the head was restarted, and d1 has not returned."""
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    kit.ready("a:n0", "g-0")
    kit.restart()
    kit.ask("a:n0", hello(*watched))
    return kit


def pass_time(kit: HeadKit, seconds: float) -> list[list[str]]:
    """Let time pass in which the agent beats; return the workers that were stopped."""
    stopped = []
    for _ in range(int(seconds)):
        kit.tell("a:n0", Beat("n0-1"))
        kit.wait(1)
        stopped += [stop.ids for stop in kit.sent(StopWorkers)]
    return stopped


def test_unwatched_client_that_does_not_return_has_ended():
    kit = restarted()
    assert pass_time(kit, 12) == [["g-0"]]
    assert isinstance(kit.driver("d1", token="token1"), Refuse)


def test_stopped_client_is_expected_and_welcome():
    kit = restarted("d1")
    assert pass_time(kit, 300) == []
    assert isinstance(kit.driver("d1", token="token1", host="host-n0"), Welcome)
    assert [watch.incarnation for watch in kit.sent(Watch)] == ["d1"]
    assert kit.group_states() == {"g": "running"}
    assert pass_time(kit, 300) == []


def test_end_of_its_process_ends_an_expected_client():
    kit = restarted("d1")
    pass_time(kit, 30)
    kit.tell("a:n0", ProcessGone("d1"))
    kit.wait(0)
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["g-0"]]


def test_agent_that_reconnects_still_watches_the_client():
    kit = restarted("d1")
    pass_time(kit, 30)
    kit.ask("a:n0", hello("d1"))
    assert pass_time(kit, 30) == []
    kit.ask("a:n0", hello())
    assert pass_time(kit, 12) == [["g-0"]]


@pytest.mark.parametrize("end", [Goodbye("stopped"), None])
def test_client_has_a_lease_when_its_agent_goes(end):
    """A subscriber elsewhere is notified within a lease."""
    kit = restarted("d1")
    kit.driver("d2", token="token1", pid_start=0)
    kit.tell("d2", WatchClients(["d1"]))
    gone = []
    for second in range(60):
        kit.tell("d2", Beat("d2"))
        if second < 30:
            kit.tell("a:n0", Beat("n0-1"))
        elif second == 30 and end is not None:
            kit.tell("a:n0", end)
        kit.wait(1)
        gone += [(second, one.incarnation) for one in kit.sent(ClientGone, "d2")]
    ((second, incarnation),) = gone
    assert incarnation == "d1"
    assert 30 <= second <= 30 + 2 * kit.timing.lease_s


def test_new_agentd_does_not_watch_the_client():
    kit = restarted("d1")
    pass_time(kit, 30)
    kit.ask("a:n0n0-2", hello(incarnation="n0-2"))
    for _ in range(12):
        kit.tell("a:n0n0-2", Beat("n0-2"))
        kit.wait(1)
    assert isinstance(kit.driver("d1", token="token1"), Refuse)


def test_client_with_a_tombstone_is_not_expected():
    kit = restarted()
    pass_time(kit, 12)
    kit.ask("a:n0", hello("d1"))
    assert isinstance(kit.driver("d1", token="token1"), Refuse)
    assert kit.sent(Unwatch) == []


def test_stall_of_the_head_does_not_count_as_absence():
    kit = restarted("d1")
    kit.stall(100)
    assert pass_time(kit, 30) == []
