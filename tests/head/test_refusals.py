"""Refusals in the head's log: the first of a kind at once, repetitions as a count."""

from __future__ import annotations

import pytest
from keys_kit import KeysKit, key

from rlinf_actors.head import refusal_log
from rlinf_actors.head.commands import Command, ConnectionRejected
from rlinf_actors.head.refusal_log import KINDS
from rlinf_actors.wire.key_messages import GetKeys


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


def test_rejected_connection_is_logged_with_the_reason(kit):
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
    assert turned_away(kit, key("y")) == []  # of another stranger: a repetition
    assert turned_away(kit, "", "10.0.1.1", "it came without CURVE")[0].endswith("10.0.1.1: it came without CURVE")


def test_repetitions_are_counted_and_logged_once_a_minute(kit):
    assert len(turned_away(kit)) == 1
    for _ in range(1000):
        assert turned_away(kit) == []
    assert refused(kit.wait(refusal_log.WINDOW_S)) == [
        "refused a connection from 10.0.0.9: it has no key (1000 more in the last 60 s)"
    ]
    assert refused(kit.wait(200)) == []
    assert len(turned_away(kit)) == 1


def test_head_wakes_up_to_log_repetitions(kit):
    assert kit.head.next_deadline() > kit.now + refusal_log.WINDOW_S
    turned_away(kit)
    assert kit.head.next_deadline() == kit.now + refusal_log.WINDOW_S


def test_rejections_from_many_addresses_are_logged_as_one_count(kit):
    lines = sum(len(turned_away(kit, "", f"10.1.{n // 250}.{n % 250}", "it came without CURVE")) for n in range(5000))
    assert lines == KINDS
    out = refused(kit.wait(refusal_log.WINDOW_S))
    assert [line.split(",")[0] for line in out] == [f"{5000 - KINDS} more refusals of other kinds in the last 60 s"]


def test_repeated_refusal_of_a_member_is_logged_once(kit):
    for _ in range(50):
        kit.ask("bob", GetKeys())
    assert kit.head.refusals.count == 50
    assert refused(kit.wait(refusal_log.WINDOW_S)) == [
        "refused: driver 'bob' may not say GetKeys (49 more in the last 60 s)"
    ]
