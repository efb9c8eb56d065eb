"""The audit log: who did what from where, in files that refusals cannot fill."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from sockets_kit import KeyedHead, driver_hello, refused

from rlinf_actors.errors import ConfigError
from rlinf_actors.head import audit
from rlinf_actors.head.audit import AuditLog
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.client_messages import DrainNode, EStop, GetStatus
from rlinf_actors.wire.key_messages import AddKey, RevokeKey

DRIVER = Member("driver", "ada", key="public-key")


def lines(place: Path, name: str) -> list[dict[str, str]]:
    found = sorted(place.glob(f"audit/{name}.jsonl*"), reverse=True)
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


async def test_a_member_an_action_and_its_refusal_have_lines_with_key_and_address(tmp_path: Path) -> None:
    socket = tmp_path / "head"
    head = KeyedHead(f"ipc://{socket}", audit=AuditLog(str(tmp_path)))
    ada = await head.listed("driver", "ada")
    client = head.client(ada)
    await client.request(driver_hello(), 10)
    assert "may not say AddKey" in await refused(client, AddKey(KeyPair.make().public, "driver", "eve", "ada"))
    stranger = head.client(KeyPair.make())
    await refused(stranger, GetStatus(), 0.5)
    head.close()
    accepted, rejected = lines(tmp_path, "accepted"), lines(tmp_path, "refused")
    [listed] = [one for one in accepted if one["verb"] == "AddKey"]
    assert (listed["member"], listed["from"], listed["object"]) == ("the head's own key", "127.0.0.1", "driver 'ada'")
    [hello] = [one for one in accepted if one["verb"] == "ClientHello"]
    assert (hello["member"], hello["key"], hello["outcome"]) == ("driver 'ada'", ada.public, "accepted")
    [eve] = [one for one in rejected if one.get("verb") == "AddKey"]
    assert eve["member"] == "driver 'ada'"
    assert "may not say AddKey" in eve["why"]
    assert any("127.0.0.1" in one["why"] and "verb" not in one for one in rejected), "a connection without a listed key"
    assert not [one for one in accepted if "eve" in one["object"]]


async def test_a_peer_at_a_unix_socket_is_named_by_the_kernel(tmp_path: Path) -> None:
    head = KeyedHead(f"ipc://{tmp_path / 'head'}", audit=AuditLog(str(tmp_path)))
    head.endpoint = f"ipc://{tmp_path / 'head'}"
    await head.client(None).request(AddKey(KeyPair.make().public, "driver", "ada", "me"), 10)
    head.close()
    [listed] = lines(tmp_path, "accepted")
    assert listed["from"] == f"uid {os.getuid()}, pid {os.getpid()}"


def test_refusals_push_out_no_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES", 1000)
    made = AuditLog(str(tmp_path))
    made.begun(b"peer", 1, DrainNode("n1", "ada", "fan"), DRIVER, "10.0.0.1")
    made.answered(b"peer", 1)
    for number in range(200):
        made.begun(b"peer", number, RevokeKey("ada", "eve"), LOCAL, f"10.0.0.{number}")
        made.refused(b"peer", number, "authentication", "no")
        made.noted(f"a connection from 10.0.0.{number}")
    made.close()
    [drained] = lines(tmp_path, "accepted")
    assert (drained["object"], drained["by"], drained["reason"]) == ("node 'n1'", "ada", "fan")
    files = list(tmp_path.glob("audit/refused.jsonl*"))
    assert len(files) == audit.FILES
    assert all(path.stat().st_size <= 1000 and path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_later_logs_append_and_a_question_is_no_action(tmp_path: Path) -> None:
    for number in range(2):
        made = AuditLog(str(tmp_path))
        made.begun(b"peer", number, GetStatus(), DRIVER, "")
        made.answered(b"peer", number)
        made.begun(b"peer", number, EStop("ada", wait=True), DRIVER, "")
        made.answered(b"peer", number)
        made.begun(b"peer", number, EStop("ada"), DRIVER, "")
        made.close()
    assert [(one["verb"], one["outcome"]) for one in lines(tmp_path, "accepted")] == [
        ("EStop", "not answered: the head ended")
    ] * 2


def test_control_characters_of_a_member_are_escaped(tmp_path: Path) -> None:
    made = AuditLog(str(tmp_path))
    made.begun(b"peer", 1, DrainNode("n1", "ada\n\x1b[2J", "fan"), DRIVER, "")
    made.answered(b"peer", 1)
    made.close()
    assert "\x1b" not in (tmp_path / "audit/accepted.jsonl").read_text()
    assert len(lines(tmp_path, "accepted")) == 1


def test_a_full_disk_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    full = audit._File("accepted", "/dev/full")
    full.maxBytes = 0
    for _ in range(3):
        full.handle(logging.makeLogRecord({"name": "accepted", "msg": "a line"}))
    full.close()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("the audit log /dev/full cannot be written (No space left on device): the head goes on")


def test_a_place_that_cannot_be_written_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="cannot write its audit log"):
        AuditLog("/proc")


def test_refusals_beyond_what_the_disk_takes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member whose requests are refused faster than lines are written would otherwise fill the head's memory."""
    log = AuditLog(str(tmp_path))
    monkeypatch.setattr(audit, "WAITING", 0)
    for n in range(5):
        log.noted(f"refusal {n}")
    log.begun(b"p", 1, EStop("ada"), DRIVER, "1.2.3.4")
    log.answered(b"p", 1)
    monkeypatch.setattr(audit, "WAITING", 100)
    log.noted("the last")
    log.close()
    assert [(one["why"], one["left out before"]) for one in lines(tmp_path, "refused")] == [("the last", "5")]
    assert [one["verb"] for one in lines(tmp_path, "accepted")] == ["EStop"]


def test_a_member_pushes_out_no_actions_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by itself nor by the workers of its jobs; what has no line is counted."""
    monkeypatch.setattr(audit, "FILE_BYTES", 5000)
    monkeypatch.setattr(audit, "SHARE", 10)
    now = 100.0
    log = AuditLog(str(tmp_path), lambda: now)

    def act(member: Member, verb: object, times: int = 1, whose: str = "") -> None:
        for _ in range(times):
            log.begun(b"p", 1, verb, member, "10.0.0.1", whose)
            log.answered(b"p", 1)

    eve = Member("driver", "eve")
    act(DRIVER, DrainNode("n1", "ada", "fan"))
    act(eve, EStop("eve"), 500)
    for number in range(20):
        act(Member("worker", f"job-{number}", f"job-{number}"), EStop("eve"), 50, str(eve))
    act(eve, DrainNode("n2", "eve", ""))
    now += audit.REFILL_S
    act(eve, EStop("eve"))
    act(eve, DrainNode("n3", "eve", ""))
    log.close()
    found = lines(tmp_path, "accepted")
    assert found[0]["object"] == "node 'n1'"
    told, last = [one for one in found if "left out before" in one]
    assert told["left out before"] == "1 DrainNode, 1490 EStop"
    assert (last["member"], last["left out before"]) == ("driver 'eve'", "1 DrainNode")
    assert len(found) == 1 + 10 + 1 + 1


def test_shares_of_many_members_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "SHARES", 3)
    log = AuditLog(str(tmp_path))
    for number in range(10):
        log.begun(b"p", 1, EStop("ada"), Member("driver", f"d{number}"), "")
        log.answered(b"p", 1)
    assert len(log._shares) == 3
    log.close()
