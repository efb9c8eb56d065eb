"""The head's list of keys: enrolling, ending, the remembered state, and the event log."""

from __future__ import annotations

import pace
import pytest
from head_kit import HeadKit, agent_hello
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from keys_kit import OWN, KeysKit, key

from rlinf_actors.head import commands, key_registry
from rlinf_actors.head.commands import Answer, Persist, Refuse, RequestReceived
from rlinf_actors.head.key_registry import OwnKeys
from rlinf_actors.wire.agent_messages import Welcome
from rlinf_actors.wire.key_messages import AddKey, Enrolled, GetKeys, Keys, RotateKey


def test_head_without_keys_says_how_to_make_them():
    kit = HeadKit()
    refused = kit.ask("admin", AddKey(key("a"), "agent", "n1", "me"))
    assert isinstance(refused, Refuse)
    assert "rlinf-actors keys init" in refused.text


def test_the_driver_beside_the_head_is_listed_once():
    kit = KeysKit()
    assert kit.listed()["D"].name == "here"
    assert isinstance(kit.driver("here"), Welcome)
    kit.restart()
    assert kit.good() == "D"


def test_revoked_driver_beside_the_head_stays_revoked():
    kit = KeysKit()
    kit.revoke("here")
    kit.restart()
    assert kit.good() == ""


def test_new_driver_key_beside_the_head_replaces_the_first():
    kit = KeysKit()
    kit.own = OwnKeys(OWN.public, key("E"), "here")
    kit.restart()
    assert kit.good() == "E"


def test_answer_has_the_heads_addresses():
    answer = KeysKit().ask("admin", GetKeys())
    assert isinstance(answer, Keys)
    assert (answer.head, answer.listens) == (key("H"), ["tcp://10.0.0.1:6380"])


def test_join_token_enrolls_one_key_once():
    kit = KeysKit()
    kit.token("t", "n1")
    assert kit.enroll("a") == Enrolled("agent", "n1")
    assert any("'n1' (aaaaaaaa) is listed" in line for line in kit.records())
    assert kit.enroll("b") is None  # the transport drops its messages
    kit.keyed["a:n1"] = key("a")
    assert isinstance(kit.node("n1"), Welcome)
    assert kit.good() == "Da"
    assert "was used for key aaaaaaaa" in kit.listed()["t"].why


def test_join_token_expires_after_15_minutes_at_most():
    kit = KeysKit()
    kit.token("t", "n1", seconds=1e9)
    kit.wait(key_registry.TOKEN_S - 1)
    assert kit.good() == "Dt"
    out = kit.wait(1)
    assert any("its time was over" in getattr(command, "text", "") for command in out)
    assert kit.good() == "D"
    assert kit.enroll("a") is None


def test_expired_join_token_is_refused_before_its_timer_fires():
    kit = KeysKit()
    kit.token("t", "n1", seconds=10)
    assert kit.head.admit(key("t"), kit.wall + 9.9)
    assert kit.head.admit(key("t"), kit.wall + 10) is None


def test_clock_set_back_does_not_extend_a_join_token():
    """If NTP sets the clock back, a token would be valid until the earlier time comes again."""
    kit = KeysKit()
    kit.token("t", "n1")
    back = kit.wall - key_registry.SET_BACK_S
    assert kit.head.admit(key("t"), back)
    assert kit.head.admit(key("t"), back - 1.0) is None
    kit.give("a:n2", "a")
    assert kit.head.admit(key("a"), back - 1e6), "it has no end"


def test_restarted_head_knows_valid_and_ended_keys():
    kit = KeysKit()
    kit.give("a:n1", "a")
    kit.give("a:n2", "b")
    kit.revoke("n2")
    kit.token("t", "n3", seconds=10)
    kit.restart()
    assert kit.good() == "Dat"
    kit.wait(10)
    assert kit.good() == "Da"


def test_a_name_has_one_key_and_the_newest_token():
    kit = KeysKit()
    kit.give("a:n1", "a")
    refused = kit.token("t", "n1")
    assert isinstance(refused, Refuse)
    assert "rlinf-actors keys revoke n1" in refused.text
    kit.token("u", "n2")
    kit.token("v", "n2")
    assert kit.good() == "Dav"
    assert isinstance(kit.token("w", "n1", role="driver"), Keys)  # a driver cannot have an agent's key


@pytest.mark.parametrize("public", ["", "short", key("a") + "a", "ä" * 40, key("H"), key("D")])
def test_malformed_or_known_key_is_refused(public):
    kit = KeysKit()
    assert isinstance(kit.ask("admin", AddKey(public, "agent", "n1", "me")), Refuse)
    assert kit.good() == "D"


@pytest.mark.parametrize("name", ["", "a b", "-x", "x\n", "x" * 101, "a/b"])
def test_malformed_name_is_refused(name):
    assert isinstance(KeysKit().ask("admin", AddKey(key("a"), "agent", name, "me")), Refuse)


def test_ended_key_cannot_be_listed_again():
    kit = KeysKit()
    kit.give("a:n1", "a")
    kit.revoke("n1")
    refused = kit.ask("admin", AddKey(key("a"), "agent", "n1", "me"))
    assert isinstance(refused, Refuse)
    assert kit.good() == "D"


def test_revoking_an_unknown_name_suggests_similar_ones():
    kit = KeysKit()
    kit.give("a:gpu-1", "a")
    refused = kit.revoke("gpu1")
    assert isinstance(refused, Refuse)
    assert "did you mean gpu-1" in refused.text
    assert isinstance(kit.revoke("gpu-1", role="driver"), Refuse)


def test_rotated_key_stays_valid_for_a_while():
    kit = KeysKit(lease_s=10_000.0)
    kit.give("a:n1", "a")
    assert isinstance(kit.node("n1"), Welcome)
    assert kit.ask("a:n1", RotateKey(key("b"), 3600.0)) == Enrolled("agent", "n1")
    assert kit.good() == "Dab"
    again = kit.ask("a:n1", RotateKey(key("c"), 60.0))
    assert isinstance(again, Refuse)  # with the old key
    kit.keyed["a:n1"] = key("b")
    assert isinstance(kit.ask("a:n1", agent_hello("n1")), Welcome)  # the same session
    kit.wait(3600)
    assert kit.good() == "Db"
    assert kit.node_states()["n1"] != "lost"


def test_a_member_has_two_keys_at_most():
    kit = KeysKit()
    kit.give("a:n1", "a")
    for old, new in zip("abcd", "bcde"):  # noqa: B905
        kit.keyed["a:n1"] = key(old)
        kit.ask("a:n1", RotateKey(key(new), 1e9))
    assert kit.good() == "Dde"
    assert kit.listed()["d"].expires_at == kit.wall + key_registry.RETIRING_S


def test_change_that_cannot_be_written_is_made_with_a_warning():
    kit = KeysKit()
    kit.full = True
    answer = kit.ask("admin", AddKey(key("a"), "agent", "n1", "me"))
    assert isinstance(answer, Keys)
    assert "could not write" in answer.warning
    kit.token("t", "n2")
    assert "could not write" in kit.enroll("b").warning


def test_ended_keys_are_bounded(monkeypatch):
    monkeypatch.setattr(commands, "KEPT", 2)
    kit = KeysKit()
    for letter in "abcd":
        kit.give("a:n1", letter)
        kit.revoke("n1")
        kit.wait(1)
    assert [letter for letter in kit.listed() if letter != "D"] == ["c", "d"]
    kit.restart()
    assert set(kit.listed()) == set("Dcd")


class KeysModel(RuleBasedStateMachine):
    """In any order of requests and restarts, exactly the model's keys are admitted."""

    def __init__(self) -> None:
        super().__init__()
        self.kit = KeysKit()
        self.good: dict[str, tuple[str, str]] = {"D": ("driver", "here")}
        self.until: dict[str, float] = {}
        self.used = set("DH")

    def fresh(self) -> str:
        letter = next(letter for letter in map(chr, range(33, 127)) if letter.isalnum() and letter not in self.used)
        self.used.add(letter)
        return letter

    def names(self) -> set[tuple[str, str]]:
        return set(self.good.values())

    @rule(name=st.sampled_from(["n1", "n2", "here"]), role=st.sampled_from(["agent", "driver"]), token=st.booleans())
    @precondition(lambda self: len(self.used) < 40)
    def add(self, name: str, role: str, token: bool) -> None:
        letter = self.fresh()
        answer = self.kit.ask("admin", AddKey(key(letter), role, name, "me", 100.0 if token else None))
        taken = any(who == (role, name) for who in self.good.values())
        assert isinstance(answer, Refuse) is taken
        if not taken:
            kind = "token " if token else ""
            self.end({old for old, who in self.good.items() if who == ("token " + role, name)})
            self.good[letter] = (kind + role, name)
            if token:
                self.until[letter] = self.kit.wall + 100.0

    @rule(data=st.data())
    @precondition(lambda self: any(role.startswith("token") for role, _ in self.good.values()))
    def enroll(self, data: st.DataObject) -> None:
        tokens = sorted(letter for letter, (role, _) in self.good.items() if role.startswith("token"))
        token, letter = data.draw(st.sampled_from(tokens)), self.fresh()
        self.kit.keyed["join"] = key(token)
        role, name = self.good[token]
        assert self.kit.enroll(letter) == Enrolled(role.removeprefix("token "), name)
        self.end({token})
        self.good[letter] = (role.removeprefix("token "), name)

    @rule(data=st.data(), keep_s=st.sampled_from([0.0, 50.0]))
    @precondition(lambda self: any(not role.startswith("token") for role, _ in self.good.values()))
    def rotate(self, data: st.DataObject, keep_s: float) -> None:
        whole = sorted(letter for letter, (role, _) in self.good.items() if not role.startswith("token"))
        old, new = data.draw(st.sampled_from(whole)), self.fresh()
        self.kit.keyed["x"] = key(old)
        answer = self.kit.ask("x", RotateKey(key(new), keep_s))
        assert isinstance(answer, Refuse) is (old in self.until)
        if old not in self.until:
            self.end({other for other, who in self.good.items() if who == self.good[old] and other != old})
            self.good[new] = self.good[old]
            if keep_s:
                self.until[old] = self.kit.wall + keep_s
            else:
                self.end({old})

    @rule(name=st.sampled_from(["n1", "n2", "here"]))
    def revoke(self, name: str) -> None:
        hit = {letter for letter, (_, whose) in self.good.items() if whose == name}
        assert isinstance(self.kit.revoke(name), Refuse) is (not hit)
        self.end(hit)

    @rule(seconds=st.sampled_from([1.0, 49.0, 99.0]))
    def wait(self, seconds: float) -> None:
        self.kit.wait(seconds)
        self.end({letter for letter, until in self.until.items() if until <= self.kit.wall})

    @rule()
    def restart(self) -> None:
        self.kit.restart()

    def end(self, letters: set[str]) -> None:
        for letter in letters:
            self.good.pop(letter, None)
            self.until.pop(letter, None)

    @invariant()
    def admitted_keys_are_the_valid_ones(self) -> None:
        for letter in self.used - {"H"}:
            member = self.kit.head.admit(key(letter), self.kit.wall)
            role, name = self.good.get(letter, ("", ""))
            expected = "enroll" if role.startswith("token") else role
            assert (member.role if member else "", member.name if member else "") == (expected, name), letter


TestKeysModel = KeysModel.TestCase
TestKeysModel.settings = settings(max_examples=20 * pace.rounds, stateful_step_count=30)


def test_change_is_answered_after_it_is_durable():
    kit = KeysKit()
    asked = RequestReceived(b"admin", 1, AddKey(key("a"), "agent", "n1", "me"))
    commands = kit.head.handle(asked, kit.now, kit.wall)
    assert not any(isinstance(command, Answer) for command in commands)
    (kept,) = [command for command in commands if isinstance(command, Persist)]
    assert kept.then is not None
    assert kept.change.public == key("a")
