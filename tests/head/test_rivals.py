"""A hello never takes a living node over: the secret of a run directory, silence or a goodbye decide."""

from __future__ import annotations

import pytest
from head_kit import agent_hello
from keys_kit import KeysKit, key, refused
from msgspec.structs import replace

from rlinf_actors.head.commands import Refuse
from rlinf_actors.wire.agent_messages import Beat, Goodbye, Welcome
from rlinf_actors.wire.client_messages import Warn
from rlinf_actors.wire.key_messages import AddKey, Enroll, Enrolled, KeyLimits, RotateKey
from rlinf_actors.wire.program import Program


@pytest.fixture
def kit() -> KeysKit:
    made = KeysKit()
    made.give("a:n1", "a", "n1")
    assert isinstance(made.node("n1"), Welcome)
    made.keyed["thief"] = key("a")  # a copy
    return made


@pytest.mark.parametrize("same", [True, False])  # every member sees incarnations
@pytest.mark.parametrize("secret", ["", "guessed"])
def test_copy_of_a_key_does_not_take_a_living_node(kit, same, secret):
    hello = agent_hello("n1", "n1-1" if same else "n1-2", secret=secret)
    for _ in range(3):
        kit.beat("a:n1")
        answer = kit.ask("thief", hello)
        assert isinstance(answer, Refuse)
        assert (answer.kind, "has an agentd already" in answer.text) == ("unreachable", True)
        kit.wait(1)
    assert isinstance(kit.node("n1"), Welcome)


def test_the_living_agentd_is_asked_and_told_once_a_minute(kit):
    ran = Program("ann", "n1", "agentd --head", kit.wall - 7200)
    kit.node("n1", pid=77, program=ran)
    hello = agent_hello("n1", "n1-2", secret="guessed", pid=99, program=replace(ran, user="bob"))
    refused = kit.ask("thief", hello)
    assert "has an agentd already, ann's `agentd --head` (pid 77 on n1, started 2 h ago), which was" in refused.text
    assert kit.sent(Beat, "a:n1")
    warning = kit.sent(Warn, "a:n1")[0].text
    assert "another agentd, bob's `agentd --head` (pid 99 on n1" in warning
    assert "it was refused" in warning
    kit.ask("thief", agent_hello("n1", "n1-2", secret="guessed"))
    assert not kit.sent(Warn, "a:n1")


@pytest.mark.parametrize("ends", [lambda kit: kit.tell("a:n1", Goodbye()), lambda kit: kit.wait(11)])
def test_node_is_free_after_a_goodbye_or_a_lease_of_silence(kit, ends):
    kit.unreachable("a:n1")
    assert isinstance(kit.ask("thief", agent_hello("n1", "n1-2", secret="other")), Refuse)
    ends(kit)
    assert isinstance(kit.ask("thief", agent_hello("n1", "n1-2", secret="other")), Welcome)


def test_restarted_agentd_takes_its_place_at_once(kit):
    kit.keyed["a:n1again"] = key("a")
    assert isinstance(kit.node("n1", "again"), Welcome)
    assert kit.node("n1").kind == "node_lost", "the one before comes back as a new one, and does not exit"


def test_restarted_head_keeps_a_node_for_the_agentd_that_had_it(kit):
    kit.restart()
    assert kit.ask("thief", agent_hello("n1", secret="guessed")).kind == "unreachable"
    assert isinstance(kit.node("n1"), Welcome)


def test_a_key_serves_one_node_at_a_time(kit):
    answer = kit.ask("thief", agent_hello("other", hostname="n1"))
    assert (answer.kind, "a key is for one node and user" in answer.text) == ("unreachable", True)
    assert "this node's key" in kit.sent(Warn, "a:n1")[0].text


def test_key_is_bound_to_the_node_and_user_of_its_enrolment():
    kit = KeysKit()
    kit.token("t", "n1")
    assert isinstance(kit.ask("join", Enroll(key("a"), "id-1", "lab-a")), Enrolled)
    assert kit.listed()["a"].limits == KeyLimits("lab-a", "id-1")
    kit.keyed["a:n1"] = key("a")
    hello = {"hostname": "n1"}
    assert "node id is id-2" in refused(kit.ask("a:n1", agent_hello("id-2", user="lab-a", **hello)))
    for user in ("lab-b", ""):
        assert "not for agentds of user" in refused(kit.ask("a:n1", agent_hello("id-1", user=user, **hello)))
    assert isinstance(kit.ask("a:n1", agent_hello("id-1", user="lab-a", **hello)), Welcome)
    kit.restart()
    assert isinstance(kit.ask("a:n1", agent_hello("id-1", user="lab-a", **hello)), Welcome)


def test_two_users_of_a_node_have_keys_of_their_own():
    kit = KeysKit()
    for user, letter in (("lab-a", "a"), ("lab-b", "b")):
        kit.ask("admin", AddKey(key(letter), "agent", "n1", "me", limits=KeyLimits(user)))
        kit.keyed[user] = key(letter)
        assert isinstance(kit.ask(user, agent_hello(f"id-{user}", hostname="n1", user=user)), Welcome)
    assert (
        "has a key already" in kit.ask("admin", AddKey(key("c"), "agent", "n1", "me", limits=KeyLimits("lab-a"))).text
    )
    taken = kit.ask("lab-b", agent_hello("id-lab-a", hostname="n1", user="lab-b", secret="of id-lab-a"))
    assert "belongs to agent 'n1' of user 'lab-a'" in refused(taken)
    kit.revoke("n1", user="lab-a")
    assert kit.good() == "Db"
    kit.revoke("n1")
    assert kit.good() == "D"


def test_join_token_for_a_user_is_not_for_another():
    kit = KeysKit()
    kit.keyed["join"] = key("t")
    kit.ask("admin", AddKey(key("t"), "agent", "n1", "me", 900.0, KeyLimits("lab-a")))
    assert "is for user 'lab-a'" in kit.ask("join", Enroll(key("a"), "", "lab-b")).text
    assert isinstance(kit.ask("join", Enroll(key("a"), "", "lab-a")), Enrolled)


def test_copy_of_a_key_cannot_end_a_living_node_by_rotations(kit):
    """Neither at once, nor by a second one, which would end what the first one has left."""
    at_once = kit.ask("thief", RotateKey(key("b"), 0.0))
    assert (at_once.kind, "runs with a key that would end now" in at_once.text) == ("usage", True)
    assert "to be changed" in kit.sent(Warn, "a:n1")[0].text
    assert isinstance(kit.ask("thief", RotateKey(key("b"), 3600.0)), Enrolled)
    kit.keyed["thief"] = key("b")
    assert kit.ask("thief", RotateKey(key("c"), 3600.0)).kind == "usage"
    kit.beat("a:n1")
    assert set("ab") <= set(kit.good())
    kit.tell("a:n1", Goodbye())
    assert isinstance(kit.ask("thief", RotateKey(key("c"), 0.0)), Enrolled), "no agentd uses a key"
