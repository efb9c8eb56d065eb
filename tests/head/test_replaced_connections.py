"""Drivers, workers and agents that replace their connection to the head. Each connection has an identity of its own."""

from __future__ import annotations

import pytest
from head_kit import HeadKit, agent_hello, client_hello

from rlinf_actors.head.commands import Refuse
from rlinf_actors.wire.agent_messages import Goodbye, StartWorkers, Welcome
from rlinf_actors.wire.client_messages import Events, GetEvents, GetNodes, StopGroup, WorkerChanged

FIRST, SECOND = "driver:d1#aa.9", "driver:d1#bb.10"


@pytest.fixture
def kit() -> HeadKit:
    """A head with a node and a driver that has said hello by its first connection."""
    kit = HeadKit()
    kit.node("n0")
    assert isinstance(kit.ask(FIRST, client_hello("d1")), Welcome)
    kit.ask(FIRST, GetNodes(1))
    return kit


def replace_connection(kit: HeadKit) -> None:
    assert isinstance(kit.ask(SECOND, client_hello("d1")), Welcome)


def test_request_of_a_replaced_connection_is_answered_once_by_the_new_one(kit):
    assert kit.ask(FIRST, GetNodes(2)) is None
    replace_connection(kit)
    assert kit.ask(SECOND, GetNodes(2)) is None
    kit.node("n1", ip="10.0.0.2")
    assert [peer for peer, _ in kit.answers() if peer.startswith("driver")] == [SECOND]


def test_reader_of_events_gets_each_event_by_the_new_connection_only(kit):
    assert kit.ask(FIRST, GetEvents(-1, namespace="ns", wait_s=100.0)) is None
    replace_connection(kit)
    assert kit.ask(SECOND, GetEvents(-1, namespace="ns", wait_s=100.0)) is None
    kit.launch("g", [0], peer=SECOND)
    assert [peer for peer, answer in kit.answers() if isinstance(answer, Events)] == [SECOND]


def test_launch_that_was_repeated_starts_its_workers_once(kit):
    kit.launch("g", [0], peer=FIRST)
    replace_connection(kit)
    again = kit.launch("g", [0], peer=SECOND)
    assert not isinstance(again, Refuse)
    assert not kit.sent(StartWorkers)


def test_repeated_stop_is_answered_by_the_new_connection(kit):
    kit.launch("g", [0], peer=FIRST)
    kit.ready("a:n0", "g-0")
    assert kit.ask(FIRST, StopGroup("ns", "g", 1.0)) is None
    replace_connection(kit)
    assert kit.ask(SECOND, StopGroup("ns", "g", 1.0)) is None
    kit.exited("a:n0", "g-0")
    assert [peer for peer, _ in kit.answers()].count(SECOND) == 1


def test_changes_of_groups_are_sent_by_the_new_connection(kit):
    kit.launch("g", [0], peer=FIRST)
    replace_connection(kit)
    kit.ready("a:n0", "g-0")
    assert kit.sent(WorkerChanged, SECOND)
    assert not kit.sent(WorkerChanged, FIRST)


def test_hello_of_a_connection_that_comes_after_its_successor_is_ignored(kit):
    """While a head starts, the connection that was made first may be accepted last."""
    replace_connection(kit)
    late = kit.ask(FIRST, client_hello("d1"))
    assert isinstance(late, Refuse)
    assert late.kind == "hello"
    kit.launch("g", [0], peer=SECOND)
    kit.ready("a:n0", "g-0")
    assert kit.sent(WorkerChanged, SECOND)


def test_hello_of_an_agent_that_comes_after_its_successor_is_ignored():
    kit = HeadKit()
    first, second = "agent:n0-1#aa.1", "agent:n0-1#bb.2"
    kit.ask(second, agent_hello("n0"))
    late = kit.ask(first, agent_hello("n0"))
    assert isinstance(late, Refuse)
    assert late.kind == "hello"
    assert kit.head.nodes.get("n0").peer == second.encode()


def test_agent_started_anew_may_use_any_connection():
    """Identities of two processes have no order."""
    kit = HeadKit()
    kit.ask("agent:n0-1#aa.7", agent_hello("n0"))
    assert isinstance(kit.ask("agent:n0-2#bb.1", agent_hello("n0", "n0-2")), Welcome)


def test_end_of_a_driver_ends_the_session_of_its_new_connection(kit):
    replace_connection(kit)
    kit.tell(SECOND, Goodbye("over"))
    assert kit.clients() == 0
