"""Refusals by keys, rights and quotas are events, once a minute for each kind, beside what the head has accepted."""

from __future__ import annotations

from typing import Any

import pytest
from keys_kit import KeysKit, key, two_jobs

from rlinf_actors.head.commands import LogEvent, Refuse
from rlinf_actors.head.quotas import LIMITS
from rlinf_actors.wire.client_messages import Events, FindGroup, GetEvents
from rlinf_actors.wire.key_messages import Enroll, RotateKey


@pytest.fixture
def kit() -> KeysKit:
    return two_jobs()


def events(kit: KeysKit, kind: str) -> list[str]:
    found = kit.ask("admin", GetEvents(0))
    assert isinstance(found, Events)
    return [event.text for event in found.events if event.kind == kind]


REFUSED: dict[str, Any] = {
    "a key that is no key": RotateKey("x"),
    "a key without a token": Enroll(key("Z")),
    "the group of another job": FindGroup("ann", "g"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_is_one_event_and_one_line_a_minute(kit, case):
    kit.out, lines = [], []
    for _ in range(50):
        assert isinstance(kit.ask("bob", REFUSED[case]), Refuse)
        lines += [one.text for one in kit.out if isinstance(one, LogEvent)]
    (text,) = events(kit, "refused")
    assert "driver 'bob'" in text
    assert lines == [text]
    kit.wait(61)
    assert events(kit, "refused")[1:] == [f"{text} (49 more in the last 60 s)"]


def test_quota_that_refuses_is_named_in_an_event(kit):
    most = LIMITS["readers of a key"].most
    for _ in range(most):
        assert kit.ask("bob", GetEvents(-1, namespace="bob", wait_s=60.0)) is None
    assert isinstance(kit.ask("bob", GetEvents(-1, namespace="bob", wait_s=60.0)), Refuse)
    (text,) = events(kit, "refused")
    assert f"driver 'bob' (GetEvents): your key has {most} readers of the event log already" in text


def test_refusals_of_many_kinds_hide_no_accepted_action(kit):
    added = events(kit, "key_added")
    for n in range(300):
        kit.ask("bob", FindGroup(f"ann-{n}", "g"))
        kit.ask("bob", RotateKey(f"{n}"))
        kit.wait(61)
    assert events(kit, "key_added") == added
    assert len(events(kit, "refused")) <= 600
