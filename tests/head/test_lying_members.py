"""Members with valid keys that lie or flood the head: their effect on others is bounded."""

from __future__ import annotations

import pytest
from head_kit import agent_hello, client_hello, running, specs
from keys_kit import KeysKit, key, two_jobs
from msgspec.structs import replace

from rlinf_actors.head import commands, jobs
from rlinf_actors.head.commands import ConnectionRejected, Refuse, RequestReceived, TimerDue
from rlinf_actors.head.event_log import KEPT_EVENTS
from rlinf_actors.head.quotas import KEPT_OF_ONE, LIMITS
from rlinf_actors.head.refusal_log import KINDS, WINDOW_S
from rlinf_actors.wire.agent_messages import Beat, Goodbye, StopWorkers, Welcome
from rlinf_actors.wire.client_messages import (
    ClientGone,
    DrainNode,
    EStop,
    GetEvents,
    GetNodes,
    GetStatus,
    Handles,
    Status,
    StopGroup,
    WatchClients,
    WorkerChanged,
)
from rlinf_actors.wire.event_values import ClusterEvent
from rlinf_actors.wire.key_messages import Enrolled, RotateKey
from rlinf_actors.wire.values import Endpoint, GroupHandle, WorkerState


def limit(monkeypatch, name: str, most: int) -> None:
    monkeypatch.setitem(LIMITS, name, LIMITS[name]._replace(most=most))


@pytest.fixture
def kit() -> KeysKit:
    return two_jobs()


# --- ranks ---


def test_impossible_rank_delays_honest_agents_without_ending_them():
    kit = KeysKit()
    for name, letter in (("n1", "a"), ("n2", "b")):
        kit.give(f"a:{name}", letter, name)
    assert isinstance(kit.ask("a:n1", agent_hello("n1", rank=57)), Welcome)
    refused = kit.ask("a:n2", agent_hello("n2", ip="10.0.0.2"))
    assert (refused.kind, "on all nodes or on none" in refused.text) == ("unreachable", True)
    kit.revoke("n1")
    assert isinstance(kit.ask("a:n2", agent_hello("n2", ip="10.0.0.2")), Welcome)


def test_awaited_nodes_decide_if_nodes_have_explicit_ranks(kit):
    kit.give("a:n2", "b", "n2")
    kit.restart()
    refused = kit.ask("a:n2", agent_hello("n2", rank=57))
    assert (refused.kind, "which a head that was restarted 0 s ago awaits" in refused.text) == ("unreachable", True)
    for name in ("n0", "n1"):
        assert isinstance(kit.node(name, is_head=name == "n0"), Welcome)
    assert "on all nodes or on none" in kit.ask("a:n2", agent_hello("n2", rank=57)).text


# --- requests ---


def test_unanswered_requests_are_bounded(kit):
    for _ in range(LIMITS["requests"].most):
        assert kit.ask("bob", GetNodes(99)) is None
    refused = kit.ask("bob", GetStatus())
    assert (refused.kind, "driver 'bob' has 1024 requests without an answer already" in refused.text) == ("usage", True)
    assert kit.ask("ann", GetNodes(99, 1.0)) is None
    assert [refused.peer for refused in kit.wait(2) if isinstance(refused, Refuse)] == [b"ann"]
    kit.tell("bob", Goodbye())
    kit.keyed["bob2"] = kit.keyed["bob"]
    assert isinstance(kit.ask("bob2", client_hello("bob2", namespace="bob")), Welcome)


def test_repeated_request_counts_again(kit):
    peer = b"bob"
    member = kit.member("bob")
    for _ in range(2 * LIMITS["requests"].most):
        kit.head.handle(RequestReceived(peer, 7, GetNodes(99, 5.0), member), kit.now, kit.wall)
    refused = [command for command in kit.wait(5) if isinstance(command, Refuse) and command.kind == "timeout"]
    assert len(refused) == LIMITS["requests"].most
    assert isinstance(kit.ask("bob", GetStatus()), Status)


def test_answered_request_frees_its_place(kit):
    for n in range(2 * LIMITS["requests"].most):
        assert not isinstance(kit.ask("bob", GetStatus() if n % 2 else GetNodes(1)), Refuse)


def test_timeout_for_many_missing_nodes_names_a_few(kit):
    kit.ask("bob", GetNodes(100_000, 1.0))
    (refused,) = [command for command in kit.wait(1) if isinstance(command, Refuse)]
    assert len(refused.missing_ranks) == 99_998
    assert "21 (never seen) and 99978 more" in refused.text


def test_restarted_head_holds_requests_of_sessions_only_and_bounded(kit):
    kit.keyed["nobody"] = kit.keyed["bob"]
    kit.restart()
    assert kit.ask("nobody", StopGroup("bob", "g", 1.0)).kind == "hello"
    assert isinstance(kit.ask("bob", client_hello("bob", namespace="bob", token="token2")), Welcome)
    answers = [kit.launch(f"g{n}", [0], "bob", "bob") for n in range(LIMITS["requests"].most + 1)]
    assert [answer is None for answer in answers] == [True] * LIMITS["requests"].most + [False]
    kit.node("n0", is_head=True)
    kit.node("n1")
    assert len(kit.group_states()) == LIMITS["requests"].most


def test_restarted_head_holds_the_last_hello_and_handles_only(kit):
    kit.restart()
    for _ in range(2 * LIMITS["requests"].most):
        assert kit.ask("bob", client_hello("bob", namespace="bob")) is None
    assert isinstance(kit.ask("ann", client_hello("ann", namespace="ann", token="token1")), Welcome)
    for n in range(3):
        kit.tell("ann", Handles([GroupHandle("ann", f"h{n}", [])]))
    kit.node("n0", is_head=True)
    kit.node("n1")
    assert [(peer, type(answer)) for peer, answer in kit.answers() if peer == "bob"] == [("bob", Welcome)]
    assert [changed.group for changed in kit.sent(WorkerChanged, "ann")] == ["h2"]


# --- tombstones ---


def invented_handles(count: int, first: int = 0) -> list[WorkerState]:
    return [WorkerState(f"x{n}", n, 0, "10.0.0.1", "running") for n in range(first, first + count)]


def test_handles_of_invented_workers_evict_no_state_and_fill_no_file(kit):
    other = GroupHandle("ann", "lost", [WorkerState("real-0", 0, 0, "10.0.0.1", "running")])
    kit.tell("ann", Handles([other]))
    for n in range(10):
        kit.tell("bob", Handles([GroupHandle("bob", "nothing", invented_handles(1000, n * 1000))]))
    (changed,) = kit.sent(WorkerChanged, "bob")
    assert {worker.state for worker in changed.workers} == {"gone"}
    assert len(kit.disk.given_up) == KEPT_OF_ONE + 1
    kit.restart()
    kit.node("n0", is_head=True)
    ghost = running(specs("lost", [1], "ann", launch="real")[0], "ann")
    kit.ask("a:n1", agent_hello("n1", workers=[ghost]))
    assert [stop.ids for stop in kit.sent(StopWorkers, "a:n1")] == [["real-0"]]


def test_reports_of_invented_clients_evict_no_state_and_fill_no_file(kit):
    for n in range(10):
        kit.tell("bob", WatchClients([f"x{n}-{m}" for m in range(1000)]))
        kit.tell("ann", Beat("ann"))
        kit.wait(1)
    kit.wait(10)
    assert (
        sum(kind == "client" for kind, _ in kit.disk.given_up) <= KEPT_OF_ONE + 2
    )  # and both, which are silent by now
    assert "silent" in kit.driver("ann", namespace="ann").text


def test_watch_beyond_the_limit_is_answered_with_an_end_at_once(kit, monkeypatch):
    limit(monkeypatch, "expected clients", 2)
    kit.keyed["bob2"] = kit.keyed["bob"]
    kit.ask("bob2", client_hello("bob2", namespace="bob"))
    kit.tell("bob2", Goodbye("done"))
    kit.tell("bob", WatchClients(["x1", "x2", "x3", "bob2"]))
    assert [gone.incarnation for gone in kit.sent(ClientGone, "bob")] == ["x3", "bob2"]


def test_driver_that_restarts_often_evicts_only_its_own_tombstones(kit):
    kit.wait(10)
    for n in range(2 * KEPT_OF_ONE):
        kit.keyed[f"bob{n}"] = kit.keyed["bob"]
        kit.ask(f"bob{n}", client_hello(f"bob{n}", namespace="bob"))
        kit.tell(f"bob{n}", Goodbye())
    assert "silent" in kit.driver("ann", namespace="ann").text


def test_repeated_key_rotation_evicts_no_other_ended_key(kit, monkeypatch):
    monkeypatch.setattr(commands, "KEPT", 4)
    kit.give("a:n2", "x", "n2")
    kit.revoke("n2")
    for letter in "qrstuvw":
        assert isinstance(kit.ask("bob", RotateKey(key(letter))), Enrolled)
        kit.keyed["bob"] = key(letter)
    assert "x" in kit.listed()
    assert sum(state.ended_at is not None for state in kit.listed().values()) == 4


def test_driver_with_many_jobs_does_not_hide_other_drivers_jobs(kit, monkeypatch):
    monkeypatch.setattr(jobs, "KEPT_OWNERS", 10)
    kit.keyed["ann's terminal"] = kit.keyed["ann"]
    kit.tell("ann", Goodbye())
    for n in range(20):
        kit.keyed[f"b{n}"] = kit.keyed["bob"]
        kit.ask(f"b{n}", client_hello(f"b{n}", namespace=f"job{n}"))
        kit.tell(f"b{n}", Goodbye())
    seen = kit.ask("ann's terminal", GetEvents(namespace="ann")).events
    assert "driver_ended" in [event.kind for event in seen]


def test_agentd_that_restarts_often_evicts_only_its_own_tombstones(kit):
    for n in range(KEPT_OF_ONE + 10):
        kit.ask("a:n1", agent_hello("n1", f"n1-{n}"))
    assert len(kit.disk.given_up) == KEPT_OF_ONE


# --- the event log ---


def read(kit: KeysKit) -> list[ClusterEvent]:
    """All kept events."""
    found: list[ClusterEvent] = []
    answer = kit.ask("admin", GetEvents())
    while answer.more:
        found += answer.events
        answer = kit.ask("admin", GetEvents(answer.next, answer.log))
    return [*found, *answer.events]


def kinds(kit: KeysKit) -> list[str]:
    return [event.kind for event in read(kit)]


def test_one_long_message_does_not_evict_the_event_log(kit):
    before = kinds(kit)
    kit.exited("a:n1", "g-1", stderr_tail=["x" * 10**6] * 20, reason="y" * 10**7, exit_code=1)
    assert kinds(kit) == [*before, "worker_died"]
    died = read(kit)[-1]
    assert sum(map(len, died.exit.stderr_tail)) + len(died.exit.reason) < 100_000


def test_long_exit_reports_are_truncated(kit):
    kit.tell("bob", Goodbye("z" * 10**7))
    assert len(kit.driver("bob", namespace="bob").text) < 2000
    kit.tell("a:n1", Goodbye("z" * 10**7))
    (changed,) = kit.sent(WorkerChanged, "ann")
    assert len(changed.workers[0].exit.reason) < 2000


def test_job_that_floods_the_event_log_evicts_its_own_events(kit):
    before = kinds(kit)
    for n in range(KEPT_EVENTS // 2 + 10):
        kit.keyed[f"bob{n}"] = kit.keyed["bob"]
        kit.ask(f"bob{n}", client_hello(f"bob{n}", namespace="bob"))
        kit.tell(f"bob{n}", Goodbye())
    after = kinds(kit)
    assert len(after) == KEPT_EVENTS
    assert [kind for kind in after if "driver" not in kind] == [kind for kind in before if "driver" not in kind]


def test_strangers_do_not_evict_other_events(kit):
    before = kinds(kit)
    for minute in range(KEPT_EVENTS // KINDS + 10):
        for n in range(KINDS):
            kit.head.handle(ConnectionRejected("", f"10.{minute}.1.{n}", "it came without CURVE"), kit.now, kit.wall)
        kit.now += WINDOW_S
        kit.head.handle(TimerDue(), kit.now, kit.wall)
    after = read(kit)
    assert len(after) == KEPT_EVENTS
    assert after[-1].seq > KEPT_EVENTS
    assert [event.kind for event in after[: len(before)]] == before


def test_repeated_emergency_stops_do_not_evict_other_events(kit):
    before = [event.text for event in read(kit) if event.namespace != "bob" and event.node != "n1"]
    for _ in range(KEPT_EVENTS // 2 + 10):
        kit.ask("a:n1", EStop("me"))
        kit.ask("bob", EStop("me", release=True))
    assert set(before) <= {event.text for event in read(kit)}


# --- limits ---


def test_agentd_that_changes_its_id_often_is_limited(kit, monkeypatch):
    limit(monkeypatch, "nodes", 3)
    for n in range(2):
        kit.wait(kit.timing.lease_s + 1)  # the node before is lost, and its rank is kept
        kit.keyed[f"a:n1-{n}"] = kit.keyed["a:n1"]
        assert isinstance(kit.ask(f"a:n1-{n}", agent_hello(f"id{n}", hostname="n1")), Welcome)
    kit.keyed["a:more"] = kit.keyed["a:n1"]
    refused = kit.ask("a:more", agent_hello("more", hostname="n1")).text
    assert "3 nodes already" in refused
    assert refused.endswith(
        "They are n1 (10.0.0.1), lost for 12 s; n1 (10.0.0.1), lost for 1 s; n1 (10.0.0.1), ready for 0 s"
    )
    assert isinstance(kit.ask("a:n1-1", agent_hello("id1", hostname="n1")), Welcome), "a hello may be repeated"


def test_drivers_of_one_key_are_limited(kit):
    kit.node("n0", is_head=True)
    for n in range(LIMITS["drivers"].most):
        kit.keyed[f"b{n}"] = kit.keyed["bob"]
        last = kit.ask(f"b{n}", client_hello(f"b{n}", namespace=f"job{n}", host="host-n0", pid=1))
    assert (last.kind, "driver 'bob' has 1000 driver processes already" in last.text) == ("usage", True)
    assert "They are a driver (pid 100 on a machine without an agentd); a driver (" in last.text
    assert last.text.endswith("; and 997 more")
    assert isinstance(kit.driver("ann", namespace="ann"), Welcome)


@pytest.mark.parametrize("name", ["a b", "a\x1b[2J", "..", "a/b", "a" * 129, "größe"])
def test_names_outside_the_grammar_are_refused(kit, name):
    kit.node("n0", is_head=True)
    kit.driver("ann", namespace="ann")
    refused = [
        kit.launch(name, [0], peer="ann", namespace="ann"),
        kit.ask("b", client_hello("b", namespace=name)),
        kit.ask("a:n1", agent_hello("n1", hostname=name)),
    ]
    for answer, of in zip(refused, ("a group", "a job", "a node"), strict=True):
        assert f"cannot be {of}'s name: a name has 1 to 128 letters" in answer.text
        assert answer.text.isprintable()
    assert isinstance(kit.driver("rlinf", namespace="Tool-RolloutGroup_1.gloo@n1+x"), Welcome)


def test_a_long_description_of_a_node_is_refused(kit):
    refused = kit.ask("a:n1", agent_hello("n1", "n1-2", faults=["x" * 60_000] * 20))
    assert (refused.kind, len(refused.text) < 200) == ("usage", True)


def test_repeated_drains_of_an_agent_fill_no_file(kit, monkeypatch):
    limit(monkeypatch, "drains", 3)
    kit.tell("a:n1", Goodbye())
    for n in range(5):
        kit.keyed[f"a:n1-{n}"] = kit.keyed["a:n1"]
        kit.ask(f"a:n1-{n}", agent_hello(f"id{n}", hostname="n1"))
        kit.ask(f"a:n1-{n}", DrainNode(f"id{n}", "me"))
        kit.tell(f"a:n1-{n}", Goodbye())
    assert len(kit.disk.drained) == 3
    refused = kit.ask("admin", DrainNode("n0", "me")).text
    assert "3 nodes that are being drained already" in refused
    assert "They are id0: no reason was given (by me (agent 'n1')); " in refused


# --- other jobs ---


def test_client_cannot_claim_groups_of_another_job(kit):
    kit.restart()
    kit.node("n0", is_head=True)
    own = running(specs("g", [0, 1], "ann")[1], "ann")
    kit.ask("a:n1", agent_hello("n1", workers=[replace(own, spec=replace(own.spec, token="token1"))]))
    kit.keyed["ann"] = kit.keyed["bob"]
    assert "owns groups of another job" in kit.ask("ann", client_hello("ann", namespace="bob")).text
    assert kit.group_states() == {"g": "starting"}


def test_agent_cannot_give_a_driver_groups_of_another_job(kit):
    made = running(specs("h", [1], "ann", launch="x")[0], "bob", endpoint=Endpoint("h", "ipc://x"))
    kit.ask("a:n1", agent_hello("n1", workers=[replace(made, spec=replace(made.spec, token="token1"))]))
    assert not kit.sent(WorkerChanged, "bob")
    assert "h" not in kit.group_states()
