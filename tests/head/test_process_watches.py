"""Reports of agents about watched processes, and which of them the head believes."""

from __future__ import annotations

import pytest
from head_kit import HeadKit

from rlinf_actors.head.client_ends import PING
from rlinf_actors.wire.agent_messages import Beat, ProcessGone, Unwatch, Watch, Welcome


@pytest.fixture
def kit() -> HeadKit:
    """Driver d1 on the machine of n0; the agent of n1 claims to be on that machine too."""
    kit = HeadKit(lease_s=10)
    kit.node("n0")
    kit.driver(host="host-n0")
    kit.node("n1", ip="10.0.0.2", host="host-n0")
    assert kit.sent(Watch, "a:n1") == [Watch("d1", 100, 5)]
    return kit


def test_client_with_an_open_connection_survives_a_false_report(kit):
    kit.tell("a:n1", ProcessGone("d1"))
    kit.beats("a:n0", "a:n1", "d1", seconds=30)
    assert kit.clients() == 1


def test_stopped_client_lives_while_another_agent_watches_it(kit):
    kit.tell("a:n1", ProcessGone("d1"))
    kit.beats("a:n0", "a:n1", seconds=60)
    assert kit.clients() == 1
    kit.tell("a:n0", ProcessGone("d1"))
    kit.beats("a:n0", "a:n1", seconds=9)
    assert kit.clients() == 1
    kit.beats("a:n0", "a:n1", seconds=1)
    assert kit.clients() == 0, "an unwatched driver was silent for a lease"


@pytest.mark.parametrize("agent", ["a:n0", "a:n1"])
def test_end_hidden_by_one_agent_is_reported_by_another(kit, agent):
    kit.killed("d1", agent)
    assert kit.clients() == 0
    other = "a:n1" if agent == "a:n0" else "a:n0"
    assert kit.sent(Unwatch, other) == [Unwatch("d1")]


def test_connection_may_close_after_the_report(kit):
    kit.tell("a:n0", ProcessGone("d1"))
    tries = len(kit.sent(Beat, "d1")) + sum(isinstance(c.body, Beat) for c in kit.wait(0.5))
    assert tries > 2
    kit.unreachable("d1")
    assert kit.clients() == 0


def test_last_message_of_a_dead_client_may_be_handled_after_the_report(kit):
    kit.tell("a:n0", ProcessGone("d1"))
    kit.wait(0.5)
    kit.tell("d1", Beat("d1"))
    kit.wait(0.5)
    kit.unreachable("d1")
    assert kit.clients() == 0


def test_connection_may_close_long_after_the_report(kit):
    kit.tell("a:n0", ProcessGone("d1"))
    kit.beats("a:n0", "a:n1", seconds=8)
    kit.unreachable("d1")
    assert kit.clients() == 0


def test_connection_that_closes_after_a_message_ends_no_client(kit):
    kit.tell("a:n1", ProcessGone("d1"))
    kit.beats("d1", seconds=4)
    kit.unreachable("d1")
    kit.unreachable("nobody")
    assert kit.clients() == 1


def test_watched_client_that_has_closed_its_connection_ends_after_a_lease(kit):
    """Its process runs another program (os.exec)."""
    kit.beats("a:n0", "a:n1", seconds=2)
    assert kit.sent(Beat, "d1") == [Beat(PING)]
    kit.unreachable("d1")
    kit.beats("a:n0", "a:n1", seconds=8)
    assert kit.clients() == 1
    kit.beats("a:n0", "a:n1", seconds=1)
    assert kit.clients() == 0
    assert any("silent for 10 s, and its connection is closed" in line for line in kit.records())


def test_silent_client_has_a_lease_from_the_end_of_its_connection(kit):
    kit.beats("a:n0", "a:n1", seconds=60)
    kit.unreachable("d1")
    kit.beats("a:n0", "a:n1", seconds=8)
    assert kit.clients() == 1
    kit.driver(host="host-n0")
    kit.beats("a:n0", "a:n1", seconds=60)
    assert kit.clients() == 1, "its connection is open"


def test_process_that_ends_after_its_connection_ends_the_client_at_once(kit):
    kit.unreachable("d1")
    kit.killed("d1", "a:n0")
    assert kit.clients() == 0


@pytest.mark.parametrize("up_s", [2.0**power + 0.1 for power in range(10, 24)])
def test_silent_client_is_checked_at_each_deadline(up_s):
    """The sum and the difference of two times may round differently, by how long the machine is up."""
    kit = HeadKit()
    kit.now = up_s
    kit.node("n0")
    kit.driver(host="host-n0")
    kit.wait(2.5)
    assert kit.sent(Beat, "d1") == [Beat(PING)] * 2


def test_client_that_beats_is_not_checked(kit):
    kit.beats("a:n0", "a:n1", "d1", seconds=10)
    assert PING not in [beat.incarnation for beat in kit.sent(Beat, "d1")]


def test_client_that_reconnects_lives(kit):
    kit.tell("a:n1", ProcessGone("d1"))
    hello = kit.driver(host="host-n0")
    assert isinstance(hello, Welcome)
    kit.unreachable("d1")
    assert kit.clients() == 1


def test_report_of_an_agent_on_another_host_is_ignored(kit):
    kit.node("n2", ip="10.0.0.3")
    assert not kit.sent(Watch)
    kit.tell("a:n2", ProcessGone("d1"))
    assert not kit.sent(Beat, "d1")
