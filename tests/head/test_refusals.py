"""What the head's log says of who was refused: the first of its kind at once, repetitions by their number."""

from __future__ import annotations

import pytest
from head_kit import HeadKit
from keys_kit import KeysKit, key, two_jobs

from rlinf_actors.head import event_log
from rlinf_actors.head.commands import Command, ConnectionRejected, LogEvent
from rlinf_actors.security.refusal_tally import KINDS
from rlinf_actors.wire.agent_messages import Refusal, RefusalReport
from rlinf_actors.wire.client_messages import GetEvents, GetKeys


@pytest.fixture
def kit() -> KeysKit:
    made = KeysKit()
    made.give("bob", "B", role="driver")
    return made


def refused(commands: list[Command]) -> list[str]:
    return [command.text for command in commands if "refuse" in getattr(command, "text", "")]


def turned_away(kit: KeysKit, public: str = "", address: str = "10.0.0.9", why: str = "") -> list[str]:
    kit.out = kit.head.handle(ConnectionRejected(public, address, why), kit.now, kit.wall)
    return kit.records()


def test_a_connection_that_was_turned_away_is_in_the_log_with_the_reason(kit):
    kit.token("t", "n5", seconds=30)
    kit.wait(30)
    kit.revoke("bob")
    reasons = {
        key("x"): "key xxxxxxxx is not listed",
        key("t"): "the join token of agent 'n5' (tttttttt) has ended 0 s ago: its time was over",
        key("B"): "the key of driver 'bob' (BBBBBBBB) has ended 0 s ago: me revoked it",
    }
    for public, why in reasons.items():
        assert turned_away(kit, public) == [f"refused a connection from 10.0.0.9: {why}"]
    assert turned_away(kit, key("y")) == []  # another stranger's: a repetition
    assert turned_away(kit, "", "10.0.1.1", "it came without CURVE")[0].endswith("10.0.1.1: it came without CURVE")


def test_repetitions_are_counted_and_said_once_a_minute(kit):
    assert len(turned_away(kit)) == 1
    for _ in range(1000):
        assert turned_away(kit) == []
    assert refused(kit.wait(event_log.WINDOW_S)) == [
        "refused a connection from 10.0.0.9: it has no key (1000 more in the last 60 s)"
    ]
    assert refused(kit.wait(200)) == []
    assert len(turned_away(kit)) == 1


def test_the_head_wakes_up_for_the_end_of_that_minute(kit):
    assert kit.head.next_deadline() > kit.now + event_log.WINDOW_S
    turned_away(kit)
    assert kit.head.next_deadline() == kit.now + event_log.WINDOW_S


def test_strangers_from_everywhere_do_not_fill_the_log(kit):
    lines = sum(len(turned_away(kit, "", f"10.1.{n // 250}.{n % 250}", "it came without CURVE")) for n in range(5000))
    assert lines == KINDS
    out = refused(kit.wait(event_log.WINDOW_S))
    assert [line.split(",")[0] for line in out] == [f"{5000 - KINDS} more refusals of other kinds in the last 60 s"]


def test_a_member_that_asks_again_and_again_is_one_line(kit):
    for _ in range(50):
        kit.ask("bob", GetKeys())
    assert kit.head.refused == 50
    assert refused(kit.wait(event_log.WINDOW_S)) == [
        "refused: driver 'bob' may not say GetKeys (49 more in the last 60 s)"
    ]


# --- at the sockets of nodes ---


def told(kit: HeadKit, peer: str, *refusals: Refusal) -> list[str]:
    kit.tell(peer, RefusalReport(list(refusals)))
    return kit.records()


STRANGER = "a connection from 10.0.0.9: key xxxxxxxx is not its job's"


@pytest.fixture
def jobs() -> KeysKit:
    made = two_jobs()
    made.ready("a:n0", "g-0")
    return made


def test_who_was_refused_by_a_worker_is_in_the_log_of_its_job(jobs):
    jobs.tell("a:n0", RefusalReport([Refusal(STRANGER, 3, "g-0")]))
    (record,) = [command for command in jobs.out if isinstance(command, LogEvent)]
    assert record.text == f"worker g:0 (process 77) on node n0 refused {STRANGER} (3 times)"
    assert (record.kind, record.namespace, record.node, record.worker_id) == ("refused", "ann", "n0", "g-0")
    seen = {peer: jobs.ask(peer, GetEvents(0, namespace=peer)) for peer in ("ann", "bob")}
    assert {peer: [e.text for e in found.events if e.kind == "refused"] for peer, found in seen.items()} == {
        "ann": [record.text], "bob": []
    }  # fmt: skip


def test_repetitions_from_nodes_are_counted_by_the_minute(jobs):
    assert len(told(jobs, "a:n0", Refusal(STRANGER, 1, "g-0"))) == 1
    for _ in range(12):
        assert told(jobs, "a:n0", Refusal(STRANGER, 100, "g-0")) == []
    assert [line for line in refused(jobs.wait(event_log.WINDOW_S)) if "more in" in line] == [
        f"worker g:0 (process 77) on node n0 refused {STRANGER} (1200 more in the last 60 s)"
    ]


def test_an_agent_is_believed_of_its_own_node_alone(jobs):
    (line,) = told(jobs, "a:n1", Refusal(STRANGER, 1, "g-0"))
    assert line == f"node n1 (10.0.0.1) refused at the socket of a worker that has ended {STRANGER}"
    (line,) = told(jobs, "a:n1", Refusal("a connection to its template's socket: it is no agentd's"))
    assert line == "node n1 (10.0.0.1) refused a connection to its template's socket: it is no agentd's"
    for peer in ("ann", "w"):
        assert told(jobs, peer, Refusal(STRANGER, 1, "g-0"))[0].endswith("may not say RefusalReport")


def test_an_agent_that_tells_much_leaves_room_for_others(jobs):
    lines = told(jobs, "a:n1", *(Refusal(f"somebody {n}") for n in range(200)))
    assert len(lines) == event_log.KINDS_OF_NODE
    assert len(told(jobs, "a:n0", Refusal(STRANGER, 1, "g-0"))) == 1
    assert len(turned_away(jobs)) == 1
    count = 200 - event_log.KINDS_OF_NODE
    assert f"{count} more refusals of other kinds in the last 60 s" in "\n".join(refused(jobs.wait(60)))
