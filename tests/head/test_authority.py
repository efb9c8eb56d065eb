"""A head with keys: the messages and claims of each role, and the effects of a revoked key."""

from __future__ import annotations

import pytest
from head_kit import agent_hello, client_hello, job_key, running, specs
from keys_kit import KeysKit, key, refused, two_jobs

from rlinf_actors.head.authority import _HOW, who_may
from rlinf_actors.head.commands import LogEvent, Refuse
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import FlushLogs, Goodbye, LogCredit, LogLines, StopWorkers, Welcome
from rlinf_actors.wire.check_values import CheckQuestion, PathTest
from rlinf_actors.wire.client_messages import (
    Detach,
    Drained,
    DrainNode,
    EndGroup,
    EnumerateHardware,
    EStop,
    EStopped,
    Events,
    GetEvents,
    GetNodes,
    GetStatus,
    Launch,
    Status,
    StopCluster,
)
from rlinf_actors.wire.debug_values import DebugQuestion
from rlinf_actors.wire.figure_values import FigureQuestion
from rlinf_actors.wire.key_messages import AddKey, Enroll, GetKeys, Keys, RevokeKey, RotateKey
from rlinf_actors.wire.log_values import LogQuestion
from rlinf_actors.wire.node_questions import AskNode
from rlinf_actors.wire.stack_values import StackQuestion
from rlinf_actors.wire.trace_values import TraceQuestion, TraceSwitch
from rlinf_actors.wire.values import HardwareQuestion


@pytest.fixture
def kit() -> KeysKit:
    return two_jobs()


# --- requests of each role ---

QUESTION = HardwareQuestion("Arm", "m", [])
REQUESTS = {
    "GetStatus": GetStatus(),
    "GetEvents": GetEvents(),
    "EStop": EStop("me"),
    "EnumerateHardware": EnumerateHardware("n1", QUESTION),
    "ReadTrace": AskNode("n1", TraceQuestion("ann")),
    "ReadStacks": AskNode("n1", StackQuestion("ann", [])),
    "AttachDebugger": AskNode("n1", DebugQuestion("ann", "g-1", "s", "me")),
    "ReadLogs": AskNode("n1", LogQuestion("ann")),
    "ReadFigures": AskNode("n1", FigureQuestion("ann")),
    "CheckNode": AskNode("n1", CheckQuestion(facts=True)),
    "SwitchTrace": AskNode("n1", TraceSwitch("ann", 1024)),
    "DrainNode": DrainNode("n1", "me"),
    "GetNodes": GetNodes(),
    "Launch": Launch("ann", "h", "m:C", specs("h", [0], "ann")),
    "AddKey": AddKey(key("x"), "agent", "n9", "me"),
    "RevokeKey": RevokeKey("ann", "me"),
    "RotateKey": RotateKey(key("x")),
    "Enroll": Enroll(key("x")),
    "GetKeys": GetKeys(),
    "StopCluster": StopCluster(),
    "Detach": Detach("ann", "g", ["g-0"]),
    "EndGroup": EndGroup("ann", "g", 1.0, "me"),
    "FlushLogs": FlushLogs("ann", 1.0),
}
MAY = {
    "a:n1": {"GetStatus", "EStop", "DrainNode", "RotateKey"},
    "ann": {"GetStatus", "GetEvents", "EStop", "EnumerateHardware", "GetNodes", "Launch", "RotateKey", "StopCluster",
            "FlushLogs", "Detach", "EndGroup", "ReadTrace", "SwitchTrace", "ReadStacks", "ReadFigures",
            "ReadLogs", "CheckNode", "AttachDebugger"},
    "w": {"GetStatus", "GetEvents", "EStop", "EnumerateHardware", "GetNodes", "Launch", "Detach"},
    "join": {"Enroll"},
    "root": {"GetStatus", "GetEvents", "EStop", "EnumerateHardware", "DrainNode", "AddKey", "RevokeKey", "GetKeys",
             "StopCluster", "FlushLogs", "EndGroup", "ReadTrace", "SwitchTrace", "ReadStacks", "ReadFigures",
             "ReadLogs", "CheckNode", "AttachDebugger"},
    "eye": {"GetStatus", "GetEvents", "ReadStacks", "ReadFigures", "ReadLogs", "CheckNode"},
}  # fmt: skip


@pytest.mark.parametrize("verb", REQUESTS)
@pytest.mark.parametrize("peer", MAY)
def test_each_role_may_send_only_its_requests(kit, peer, verb):
    kit.token("t", "n3")
    kit.keyed["root"] = key("H")
    kit.give("eye", "v", role="viewer")
    kit.ask("w", client_hello("w", role="worker", namespace="ann", worker_id="g-0", token="token1"))
    answer = kit.ask(peer, REQUESTS[verb])
    forbidden = isinstance(answer, Refuse) and "may not say" in answer.text
    assert forbidden is (verb not in MAY[peer]), answer


def test_refusal_names_the_permitted_roles_and_the_remedy(kit):
    text = kit.ask("ann", GetKeys()).text
    assert text.startswith("driver 'ann' may not say GetKeys: that is for whoever has the head's own key: on the ")
    assert "RLINF_ACTORS_KEYS=DIR" in text
    text = kit.ask("a:n1", Launch("ns", "g", "m:C", [])).text
    assert "that is for a driver's key: `rlinf-actors keys enroll --driver NAME` on the head's machine" in text
    assert who_may("Launched") == f"that is for {_HOW['head']}"
    assert who_may("Nonsense") == ""


def test_forbidden_message_is_logged_with_sender_and_kind(kit):
    refused(kit.ask("a:n1", GetKeys()))
    assert kit.records() == ["refused: agent 'n1' may not say GetKeys"]


def test_forbidden_notice_is_dropped_and_counted(kit):
    before = kit.head.refusals.count
    assert [type(command) for command in kit.tell("ann", LogLines("ann", "n1", [("g:0", "stdout", "x")]))] == [LogEvent]
    assert kit.head.refusals.count == before + 1


def test_local_worker_counts_as_a_worker_on_its_own_connection():
    kit = KeysKit()
    kit.cluster()
    token = kit.launch("g", [0]).group.token
    assert isinstance(kit.driver("w", role="worker", worker_id="g-0", token=token), Welcome)
    kit.driver("other", namespace="else")
    for asked in (GetKeys(), DrainNode("n0", "me"), StopCluster(), EStop("me", release=True), agent_hello("n9")):
        assert "a worker of job 'ns' may not" in refused(kit.ask("w", asked))
    assert [str(client) for client in kit.ask("w", GetStatus()).clients] == kit.ask("w", GetStatus("ns")).clients
    assert isinstance(kit.ask("w", EStop("me")), EStopped)
    assert isinstance(kit.driver("w", role="worker", worker_id="g-0", token=token), Welcome)


# --- claims of agents ---


def test_agent_must_report_the_node_of_its_key(kit):
    kit.give("a:n2", "b", "n2")
    assert "a node has the name of its key" in refused(kit.ask("a:n2", agent_hello("n7")))
    assert "that agent needs no key" in refused(kit.ask("a:n2", agent_hello("n2", is_head=True)))
    assert isinstance(kit.ask("a:n2", agent_hello("7f3a", hostname="n2")), Welcome)


def test_agent_cannot_register_as_another_node(kit):
    kit.give("a:n2", "b", "n2")
    for other in ("n1", "n0"):
        text = refused(kit.ask("a:n2", agent_hello(other, f"{other}-9", hostname="n2")))
        assert "belongs to" in text
    assert kit.node_states() == {"n0": "ready", "n1": "ready"}


def test_restarted_head_knows_the_key_of_each_node(kit):
    kit.give("a:n2", "b", "n2")
    kit.restart()
    assert "belongs to agent 'n1'" in refused(kit.ask("a:n2", agent_hello("n1", "n1-9", hostname="n2")))


def test_node_registered_without_keys_gets_its_key(kit):
    kit.node("n2")
    kit.give("a:n2-2", "b", "n2")
    assert "belongs to a local process" in refused(kit.node("n2", "-2"))
    kit.wait(30)
    assert isinstance(kit.node("n2", "-2"), Welcome)


def test_agent_can_drain_its_own_node_only(kit):
    kit.give("a:n2", "b", "n2")
    kit.node("n2")
    assert "its own node only" in refused(kit.ask("a:n2", DrainNode("n1", "me")))
    answer = kit.ask("a:n2", DrainNode("n2", "root@n2", "a fan"))
    assert isinstance(answer, Drained)
    assert "root@n2 (agent 'n2')" in answer.node.draining


def test_driver_can_end_groups_of_its_own_jobs_only(kit):
    asked = EndGroup("ann", "g", 1.0, "me", "done")
    assert "driver 'bob' may end groups of its own jobs only, and job 'ann' is not one" in refused(
        kit.ask("bob", asked)
    )
    kit.ask("ann", asked)
    stop = kit.sent(StopWorkers)[0]
    assert stop.reason == "me (driver 'ann') ended it: done"


@pytest.mark.parametrize(
    "verb",
    [
        "ReadTrace",
        "ReadStacks",
        "ReadFigures",
        "ReadLogs",
        "SwitchTrace",
        "AttachDebugger",
    ],
)
def test_a_driver_reads_traces_and_debugs_in_its_own_jobs_only(kit, verb):
    asked = REQUESTS[verb]
    assert "its own jobs only" in refused(kit.ask("bob", asked))
    assert kit.ask("ann", asked) is None


def test_a_driver_does_not_read_the_figures_of_all_jobs(kit):
    assert "may read figures of its own jobs only, and any job is not" in refused(
        kit.ask("ann", AskNode("n1", FigureQuestion()))
    )


def test_a_viewer_sees_all_jobs_and_no_host_ids(kit):
    kit.give("eye", "v", role="viewer")
    status = kit.ask("eye", GetStatus())
    assert {driver.namespace for driver in status.drivers} == {"ann", "bob"}
    assert [group.name for group in status.groups] == ["g"]
    assert not any(group.token for group in status.groups)
    assert {node.report.host for node in status.nodes} == {""}
    assert {event.namespace for event in kit.ask("eye", GetEvents()).events} >= {"ann", "bob"}
    assert kit.ask("eye", AskNode("n1", FigureQuestion())) is None  # n1 is asked


def test_a_viewer_reads_facts_and_loads_no_network(kit):
    kit.give("eye", "v", role="viewer")
    asked = AskNode("n1", CheckQuestion(path=PathTest("listen", "10.0.0.1")))
    assert "the test of a path loads the network" in refused(kit.ask("eye", asked))


@pytest.mark.parametrize("peer", ["ann", "eye"])
def test_the_log_of_an_agentd_is_for_the_administrator(kit, peer):
    """It names the jobs of all drivers."""
    kit.give("eye", "v", role="viewer")
    kit.keyed["root"] = key("H")
    asked = AskNode("n1", CheckQuestion(log=True))
    assert "may not read the logs of agentds" in refused(kit.ask(peer, asked))
    assert kit.ask("root", asked) is None


def test_a_viewer_has_no_session_and_cannot_stop_robots(kit):
    kit.give("eye", "v", role="viewer")
    assert "viewer 'eye' may not say ClientHello" in refused(kit.ask("eye", client_hello("eye", namespace="eye")))
    for asked in (EStop("me"), EStop("me", release=True)):
        assert "viewer 'eye' may not say EStop" in refused(kit.ask("eye", asked))
    assert not kit.ask("admin", GetStatus()).stopped


def test_agent_sends_output_only_to_drivers_with_workers_on_its_node(kit):
    lines = LogLines("bob", "n1", [("g:0", "stdout", "x")])
    kit.tell("a:n1", lines)
    assert not kit.sent(LogLines)
    assert [said.chars for said in kit.sent(LogCredit, "a:n1")] == [lines.cost]
    kit.tell("a:n1", LogLines("ann", "n1", [("g:1", "stdout", "x")]))
    assert kit.sent(LogLines, "ann")
    kit.exited("a:n1", "g-1")
    kit.ask("a:n1", agent_hello("n1"))
    kit.tell("a:n1", LogLines("ann", "n1", [("g:1", "stdout", "its last words")]))
    assert kit.sent(LogLines, "ann")


def test_agent_does_not_see_which_nodes_share_a_machine(kit):
    status = kit.ask("a:n1", GetStatus())
    assert {node.report.host for node in status.nodes} == {""}


def test_text_of_a_member_becomes_one_short_log_line(kit):
    kit.ask("a:n1", EStop("x" * 10**6, "a\nforged line \x1b[2J"))
    (line,) = kit.records()
    assert len(line) <= 1001
    kit.ask("a:n1", EStop("me", "a\nforged line \x1b[2J"))
    assert "a\\nforged line \\x1b[2J" in kit.records()[0]
    kit.ask("a:n1", agent_hello("n" * 10**6))
    assert all(len(line) <= 1001 for line in kit.records())


def test_one_key_cannot_take_all_places_of_waiting_readers(kit):
    kit.keyed["bob's terminal"] = kit.keyed["bob"]
    answers = [kit.ask("bob's terminal", GetEvents(since=-1, wait_s=60)) for _ in range(33)]
    assert [answer is None for answer in answers] == [n < 32 for n in range(33)]  # the refusal is an event, and read
    assert kit.ask("admin", GetEvents(since=-1, wait_s=60)) is None


# --- claims of clients ---


def test_driver_key_cannot_act_as_a_worker_nor_worker_key_as_a_driver(kit):
    hello = client_hello("x", role="worker", namespace="ann", worker_id="g-0", token="token1")
    assert "says that it is a worker" in refused(kit.ask("bob", hello))
    assert "says that it is a driver" in refused(kit.ask("w", client_hello("x", namespace="ann")))


def test_a_job_belongs_to_the_driver_that_opened_it(kit):
    kit.keyed["bob2"] = kit.keyed["bob"]
    assert "it is the job of driver 'ann'" in refused(kit.ask("bob2", client_hello("bob2", namespace="ann")))
    wrong = client_hello("bob2", namespace="ann", token="guess")
    assert "it is the job of driver 'ann'" in refused(kit.ask("bob2", wrong))
    assert isinstance(kit.ask("bob2", client_hello("bob2", namespace="ann", token="token1")), Welcome)


def test_another_process_of_the_driver_attaches_by_the_jobs_name(kit):
    kit.keyed["ann2"] = kit.keyed["ann"]
    assert isinstance(kit.ask("ann2", client_hello("ann2", namespace="ann")), Welcome)


def test_every_driver_may_use_the_name_of_an_ended_job(kit):
    kit.tell("bob", Goodbye())
    kit.keyed["ann2"] = kit.keyed["ann"]
    assert isinstance(kit.ask("ann2", client_hello("ann2", namespace="bob")), Welcome)


def test_an_agent_cannot_choose_the_token_of_a_job(kit):
    worker = running(specs("h", [1], "ann")[0], "ann")  # with the token "old"
    kit.ask("a:n1", agent_hello("n1", workers=[worker]))
    assert kit.head.admit(job_key("token1"), kit.wall) == Member("worker", "ann", "ann", job_key("token1"))
    assert kit.head.admit(job_key("old"), kit.wall) is None


def test_output_of_another_job_is_not_flushed(kit):
    assert "has nothing to do with the output of job 'ann'" in refused(kit.ask("bob", FlushLogs("ann", 1.0)))
    assert not kit.sent(FlushLogs)


def test_a_session_belongs_to_the_key_that_began_it(kit):
    kit.keyed["ann"] = key("B")
    assert "driver 'bob' speaks as driver 'ann'" in refused(kit.ask("ann", GetNodes()))
    del kit.keyed["ann"]
    assert "a local process speaks as driver 'ann'" in refused(kit.ask("ann", GetNodes()))


def test_incarnation_of_another_member_is_refused(kit):
    kit.keyed["bob2"] = kit.keyed["bob"]
    assert "which is driver 'ann'" in refused(kit.ask("bob2", client_hello("ann", namespace="ann", token="token1")))


def test_worker_of_another_job_is_refused_by_its_key(kit):
    kit.keyed["bob's"] = job_key("token2")
    hello = client_hello("x", role="worker", namespace="ann", worker_id="g-0", token="token1")
    assert "a worker of job 'bob' says that it belongs to job 'ann'" in refused(kit.ask("bob's", hello))


def test_only_the_receiver_of_output_gives_credit(kit):
    assert [type(command) for command in kit.tell("bob", LogCredit("ann", "n1", 10))] == [LogEvent]
    assert not kit.sent(LogCredit)


def test_key_of_a_job_ends_with_the_job(kit):
    assert kit.head.admit(job_key("token2"), kit.wall)
    kit.tell("bob", Goodbye())
    assert kit.head.admit(job_key("token2"), kit.wall) is None


# --- visible nodes, jobs and events ---


def test_member_sees_all_nodes_and_its_own_jobs_only(kit):
    kit.launch("k", [0], "bob", "bob")
    kit.keyed["root"] = key("H")
    seen = {}
    for peer in ("ann", "bob", "w", "a:n1", "root", "admin"):
        status = kit.ask(peer, GetStatus())
        assert isinstance(status, Status)
        assert len(status.nodes) == 2
        seen[peer] = "".join(group.name for group in status.groups), len(status.clients)
    own = {"ann": ("g", 1), "bob": ("k", 1), "w": ("g", 1), "a:n1": ("", 0), "root": ("gk", 2), "admin": ("gk", 2)}
    assert seen == own


def test_driver_reads_events_of_its_own_jobs_only(kit):
    kit.keyed["bob's terminal"] = kit.keyed["bob"]
    for asked in (GetEvents(), GetEvents(namespace="ann")):
        events = kit.ask("bob's terminal", asked)
        assert isinstance(events, Events)
        assert {event.namespace for event in events.events} <= {"", "bob"}
    kit.tell("bob", Goodbye())
    events = kit.ask("bob's terminal", GetEvents(namespace="bob"))
    assert [event.kind for event in events.events if event.namespace] == ["driver_joined", "driver_ended"]


# --- the emergency stop ---


@pytest.mark.parametrize(("peer", "may"), [("a:n1", False), ("w", False), ("bob", True), ("admin", True)])
def test_every_member_may_press_an_emergency_stop_but_not_release_it(kit, peer, may):
    assert isinstance(kit.ask(peer, EStop("me", "smoke")), EStopped)
    answer = kit.ask(peer, EStop("me", release=True))
    assert isinstance(answer, EStopped if may else Refuse)


def test_event_log_names_the_key_that_pressed_an_emergency_stop(kit):
    kit.ask("a:n1", EStop("root@n1", "smoke"))
    assert kit.records()[0].startswith("emergency stop by root@n1 (agent 'n1'): smoke")


def test_holder_of_the_heads_own_pair_sees_all_keys(kit):
    kit.keyed["root"] = key("H")
    answer = kit.ask("root", GetKeys())
    assert isinstance(answer, Keys)
    assert {state.name for state in answer.keys} == {"here", "n1", "ann", "bob"}
    kit.ask("root", RevokeKey("bob", "root@head"))
    assert "root@head (the head's own key) revoked it" in kit.listed()["B"].why
