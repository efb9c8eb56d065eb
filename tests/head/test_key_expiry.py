"""Keys that expire, and keys that others replace."""

from __future__ import annotations

import pytest
from growth_kit import operations
from head_kit import HeadKit, agent_hello
from keys_kit import KeysKit, key

from rlinf_actors.head.commands import LogEvent, TimerDue
from rlinf_actors.wire.agent_messages import StopWorkers, Welcome
from rlinf_actors.wire.key_messages import AddKey, Enrolled, KeyLimits, Keys, RotateKey

DAY = 86400.0


@pytest.fixture
def kit() -> KeysKit:
    made = KeysKit()
    made.ask("admin", AddKey(key("t"), "agent", "n1", "me", 900.0, KeyLimits("lab"), valid_s=90 * DAY))
    made.keyed |= {"join": key("t"), "a:n1": key("a")}
    assert isinstance(made.enroll("a"), Enrolled)
    return made


def said(kit: HeadKit) -> list[str]:
    return [command.text for command in kit.out if isinstance(command, LogEvent) and command.kind == "key_ended"]


def test_key_is_refused_after_its_time(kit):
    assert isinstance(kit.ask("a:n1", agent_hello("n1", user="lab")), Welcome)
    kit.wait(89 * DAY)
    assert "a" in kit.good()
    kit.wait(1.1 * DAY)
    assert "its time was over" in said(kit)[-1]
    assert "a" not in kit.good()
    assert "has ended" in kit.head.keys.why_not(key("a"), kit.wall)


def test_expiry_ends_the_session(kit):
    kit.wait(90 * DAY - 1)
    assert isinstance(kit.ask("a:n1", agent_hello("n1", user="lab")), Welcome)
    kit.wait(2)
    assert kit.sent(StopWorkers, "a:n1")


def test_head_warns_before_a_key_expires_also_after_its_restart(kit):
    kit.wait(75 * DAY)
    assert said(kit) == []
    kit.wait(1.5 * DAY)
    (text,) = said(kit)
    assert "agent 'n1' of user 'lab'" in text
    assert "expires in 14 days: `rlinf-actors keys enroll n1 --user lab --replace`" in text
    kit.restart()
    kit.wait(1)
    assert len(said(kit)) == 1
    kit.wait(14 * DAY)
    assert [text.partition("expires in ")[2][:6] for text in said(kit)[:3]] == ["7 days", "3 days", "24 hou"]


def test_rotation_gives_no_more_time(kit):
    until = kit.listed()["a"].limits.until
    assert isinstance(kit.ask("a:n1", RotateKey(key("b"), 0.0)), Enrolled)
    assert kit.listed()["b"].limits == KeyLimits("lab", "", until)


def test_replacement_by_a_join_token_lets_the_old_key_work_for_a_day(kit):
    asked = AddKey(key("r"), "agent", "n1", "me", 900.0, KeyLimits("lab"))
    assert "--replace" in kit.ask("admin", asked).text
    kit.ask("admin", AddKey(key("r"), "agent", "n1", "me", 900.0, KeyLimits("lab"), replaces=True))
    assert kit.listed()["a"].expires_at is None, "nothing happens before the token is used"
    kit.keyed["join"] = key("r")
    assert isinstance(kit.enroll("b"), Enrolled)
    assert kit.good() == "Dab"
    kit.wait(1.1 * DAY)
    assert kit.good() == "Db"
    assert kit.listed()["b"].limits.until is None


def cost_of_expiry(count: int) -> int:
    """Return the number of operations of a head when *count* of its keys expire at one moment."""
    made = KeysKit()
    for n in range(count):
        assert isinstance(made.ask("admin", AddKey(f"{n:040}", "agent", f"n{n}", "me", valid_s=1000.0)), Keys)
    made.now += 1001
    return operations(lambda: made.head.handle(TimerDue(), made.now, made.wall))


def test_keys_that_expire_together_cost_in_proportion():
    assert cost_of_expiry(600) < 4 * cost_of_expiry(200)
