"""Jobs and sessions when a key ends or the head is restarted: a job keeps its owner, or ends."""

from __future__ import annotations

import pytest
from head_kit import agent_hello, client_hello, job_key, running, specs
from keys_kit import KeysKit, key, refused, two_jobs
from msgspec.structs import replace

from rlinf_actors.head.commands import Notify, Refuse
from rlinf_actors.head.quotas import LIMITS
from rlinf_actors.wire.agent_messages import Beat, Goodbye, StopWorkers, Welcome
from rlinf_actors.wire.client_messages import Detach, Done, GetEvents, GetNodes, GetStatus, Launch, Launched, Status
from rlinf_actors.wire.key_messages import RotateKey
from rlinf_actors.wire.values import RunningWorker


@pytest.fixture
def kit() -> KeysKit:
    return two_jobs()


# --- revoking ---


def test_revoking_an_agent_s_key_loses_its_node(kit):
    kit.revoke("n1")
    assert kit.node_states()["n1"] == "lost"
    assert [said.ids for said in kit.sent(StopWorkers, "a:n1")] == [["g-1"]]
    assert any("node n1 (10.0.0.1) is gone: its key is not valid any more: me revoked it" in r for r in kit.records())
    assert kit.tell("a:n1", Beat("n1-1")) == []  # not heard
    kit.give("a:n1", "z", "n1")
    assert isinstance(kit.node("n1", incarnation="n1-1"), Refuse)  # that session has ended
    assert isinstance(kit.ask("a:n1", agent_hello("n1", "n1-2")), Welcome)


def test_revoking_a_driver_s_key_ends_it_and_its_groups(kit):
    kit.revoke("ann")
    (goodbye,) = kit.sent(Goodbye, "ann")
    assert goodbye.lost
    assert "me revoked it" in goodbye.reason
    assert {said.ids[0] for said in kit.sent(StopWorkers)} == {"g-0", "g-1"}
    assert kit.clients() == 1
    assert kit.ask("ann", GetNodes()) is None


def test_reader_with_a_revoked_key_gets_no_answer(kit):
    kit.keyed["bob's terminal"] = kit.keyed["bob"]
    kit.ask("bob's terminal", GetEvents(since=-1, wait_s=60))
    kit.revoke("bob")
    assert not [command for command in kit.out if getattr(command, "peer", b"") == b"bob's terminal"]


def test_members_of_a_job_end_with_their_drivers_key(kit):
    for incarnation in ("w1", "w2"):
        kit.keyed[incarnation] = job_key("token1")
        hello = client_hello(incarnation, role="worker", namespace="ann", worker_id="g-0", token="token1")
        assert isinstance(kit.ask(incarnation, hello), Welcome)
    assert kit.clients() == 3  # ann, bob and the second: a worker is one process
    kit.revoke("ann")
    assert kit.clients() == 1
    assert kit.head.admit(job_key("token1"), kit.wall) is None
    assert kit.disk.jobs[0].namespace == "bob"


def test_jobs_on_a_revoked_node_end(kit):
    assert isinstance(kit.launch("k", [0], "bob", "bob"), Launched)
    kit.revoke("n1")
    (goodbye,) = kit.sent(Goodbye, "ann")
    assert "node n1 (10.0.0.1) knows its token" in goodbye.reason
    assert kit.head.admit(job_key("token1"), kit.wall) is None
    assert kit.head.admit(job_key("token2"), kit.wall)  # it was never there
    assert kit.sent(Goodbye, "bob") == []


def test_jobs_outlive_a_replaced_key(kit):
    kit.ask("ann", RotateKey(key("Z"), 5.0))
    kit.keyed["ann2"] = key("Z")
    assert isinstance(kit.ask("ann2", client_hello("ann2", namespace="ann")), Welcome)
    kit.now += 5
    kit.tell("ann2", Beat("ann2"))
    assert kit.sent(Goodbye, "ann")
    assert not kit.sent(Goodbye, "ann2")
    assert kit.head.admit(job_key("token1"), kit.wall)


def test_expired_keys_sessions_end_at_the_next_message_of_any_peer(kit):
    kit.ask("bob", RotateKey(key("Z"), 5.0))
    kit.now += 5  # and no tick
    kit.tell("ann", Beat("ann"))
    assert [type(c.body) for c in kit.out if isinstance(c, Notify) and c.peer == b"bob"] == [Goodbye]


def test_sessions_of_one_key_are_limited(kit, monkeypatch):
    monkeypatch.setitem(LIMITS, "sessions", LIMITS["sessions"]._replace(most=2))
    kit.keyed["ann2"] = kit.keyed["ann3"] = kit.keyed["ann"]
    assert isinstance(kit.ask("ann2", client_hello("ann2", namespace="ann")), Welcome)
    refused = kit.ask("ann3", client_hello("ann3", namespace="ann"))
    assert isinstance(refused, Refuse)
    assert "driver 'ann' has 2 sessions with the head already" in refused.text
    assert refused.text.count("a driver (pid ") == 2
    assert "driver 'ann' has 2 sessions" in kit.ask("admin", GetEvents()).events[-1].text
    assert isinstance(kit.ask("ann2", client_hello("ann2", namespace="ann")), Welcome)  # the agent repeats its message
    kit.tell("ann2", Goodbye())
    assert isinstance(kit.ask("ann3", client_hello("ann3", namespace="ann")), Welcome)


def test_restarted_head_does_not_await_a_revoked_driver(kit):
    kit.revoke("ann")
    kit.restart()
    assert kit.ask("ann", client_hello("ann", namespace="ann", token="token1")) is None


# --- a head that was restarted ---


def member_of_ann(token: str = "token1", id: str = "g") -> RunningWorker:
    one = running(specs("g", [0, 1], "ann", launch=id)[1], "ann")
    return replace(one, spec=replace(one.spec, token=token))


def test_job_keeps_its_owner_after_a_restart(kit):
    kit.restart()
    kit.node("n0", is_head=True)
    kit.ask("a:n1", agent_hello("n1", workers=[member_of_ann()]))
    assert "it is the job of driver 'ann'" in refused(kit.ask("bob", client_hello("bob", namespace="ann")))
    welcome = kit.ask("ann", client_hello("ann", namespace="ann", token="token1"))
    assert isinstance(welcome, Welcome)
    assert welcome.token == "token1"
    assert kit.head.admit(job_key("token1"), kit.wall)


def test_job_of_a_detached_group_keeps_its_owner_after_all_drivers_end(kit):
    launch = Launch("ann", "left", "m:C", specs("left", [1], "ann"), outlives=True)
    assert isinstance(kit.ask("ann", launch), Launched)
    assert kit.ask("ann", Detach("ann", "left", ["left-0"])) == Done()
    kit.tell("ann", Goodbye())
    assert "it is the job of driver 'ann'" in refused(kit.ask("bob", client_hello("bob2", namespace="ann")))
    kit.restart()
    kit.node("n0", is_head=True)
    [spec] = specs("left", [1], "ann")
    left = RunningWorker(replace(spec, token="token1"), "", "m:C", detached=True)
    kit.ask("a:n1", agent_hello("n1", workers=[left]))
    kit.beats("a:n0", "a:n1", seconds=300)
    assert kit.group_states() == {"left": "starting"}
    assert "it is the job of driver 'ann'" in refused(kit.ask("bob", client_hello("bob3", namespace="ann")))
    welcome = kit.ask("ann", client_hello("ann2", namespace="ann"))
    assert (type(welcome), welcome.token) == (Welcome, "token1")


def test_restarted_head_keeps_jobs_for_their_owners(kit):
    kit.restart()
    for hello in (client_hello("bob", namespace="ann", token="guess"), client_hello("bob", namespace="ann")):
        assert "it is the job of driver 'ann'" in refused(kit.ask("bob", hello))
    kit.node("n0", is_head=True)
    kit.ask("a:n1", agent_hello("n1", workers=[member_of_ann()]))
    assert kit.sent(StopWorkers) == []


def test_rogue_agent_that_returns_first_cannot_set_a_jobs_token(kit):
    kit.give("a:n2", "b", "n2")
    kit.restart()
    kit.ask("a:n2", agent_hello("n2", workers=[member_of_ann("mine", "x")]))
    assert [said.ids for said in kit.sent(StopWorkers, "a:n2")] == [["x-1"]]
    assert kit.head.admit(job_key("mine"), kit.wall) is None
    kit.node("n0", is_head=True)
    kit.ask("a:n1", agent_hello("n1", workers=[member_of_ann()]))
    assert kit.head.admit(job_key("token1"), kit.wall)


def test_rogue_agent_cannot_set_a_local_drivers_token(kit):
    welcome = kit.driver("local", namespace="mine")
    for namespace in ("mine", "nobody's yet"):
        stranger = running(specs("h", [1], namespace)[0], "local")
        kit.ask("a:n1", agent_hello("n1", workers=[stranger]))
        assert kit.head.admit(job_key("old"), kit.wall) is None
    again = kit.driver("local", namespace="mine")
    assert again.token == welcome.token


def test_job_without_returning_members_is_forgotten_after_a_restart(kit):
    kit.restart()
    kit.node("n0", is_head=True)
    kit.node("n1")
    assert kit.disk.jobs == []
    assert isinstance(kit.ask("bob", client_hello("bob2", namespace="ann")), Welcome)


def test_held_message_of_a_revoked_key_is_refused(kit):
    kit.restart()
    assert kit.ask("bob", client_hello("bob", namespace="new")) is None
    kit.revoke("bob")
    kit.wait(10)
    kit.node("n0", is_head=True)
    kit.node("n1")
    assert kit.clients() == 0


def test_agent_cannot_add_a_worker_to_a_foreign_job(kit):
    stranger = running(specs("h", [1], "ann", launch="x")[0], "ann")  # with the token "old"
    kit.ask("a:n1", agent_hello("n1", workers=[stranger]))
    assert [said.ids for said in kit.sent(StopWorkers, "a:n1")] == [["x-0"]]
    assert "h" not in kit.group_states()


def test_driver_does_not_see_a_foreign_job_with_its_ended_jobs_name(kit):
    kit.tell("bob", Goodbye())
    kit.driver("local", namespace="bob")
    kit.keyed["bob's terminal"] = kit.keyed["bob"]
    status = kit.ask("bob's terminal", GetStatus())
    assert isinstance(status, Status)
    assert status.clients == []
