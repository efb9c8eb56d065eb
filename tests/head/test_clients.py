"""Drivers and workers: membership, leases, watches, and the effects of their ends."""

from __future__ import annotations

from collections import Counter

import pytest
from head_kit import HeadKit

from rlinf_actors.head.commands import EndCluster, Notify, Refuse
from rlinf_actors.wire.agent_messages import (
    HELLO_AGAIN,
    Beat,
    Goodbye,
    LogCredit,
    LogLines,
    ProcessGone,
    StopWorkers,
    Unwatch,
    Watch,
    Welcome,
    WorkerExited,
)
from rlinf_actors.wire.client_messages import (
    ClientGone,
    Done,
    FindGroup,
    GetNodes,
    GetStatus,
    Launched,
    Status,
    StopCluster,
    WatchClients,
    WorkerChanged,
)
from rlinf_actors.wire.program import DriverState, Program
from rlinf_actors.wire.values import ExitReport


def test_members_of_a_job_share_a_token_of_their_own():
    kit = HeadKit()
    one, two, other = kit.driver("d1"), kit.driver("d2"), kit.driver("d3", namespace="else")
    assert one.token == two.token == "token1"
    assert other.token == "token2"


def test_a_job_without_members_is_forgotten():
    kit = HeadKit()
    first = kit.driver("d1").token
    kit.tell("d1", Goodbye())
    assert kit.driver("d2").token != first


def test_another_protocol_is_refused_with_both_versions_named():
    kit = HeadKit()
    refused = kit.driver(protocol=99, version="2.0")
    assert refused.kind == "protocol"
    assert "this driver is rlinf-actors 2.0 (protocol 99), the head is 1.0" in refused.text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"role": "king"}, "'king' is no role"),
        ({"namespace": ""}, "'' cannot be a job's name"),
        ({"role": "worker", "worker_id": "w9", "token": "token1"}, "worker 'w9' is not known"),
        ({"role": "worker", "worker_id": "g-0", "token": "guess"}, "does not belong to job 'ns'"),
        (
            {"role": "worker", "worker_id": "g-0", "token": "token1", "namespace": "else"},
            "does not belong to job 'else'",
        ),
    ],
)
def test_client_that_is_no_member_is_refused(fields, text):
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    refused = kit.driver("w", **fields)
    assert isinstance(refused, Refuse)
    assert refused.kind == "authentication"
    assert text in refused.text


def test_a_worker_with_the_token_is_welcome():
    kit = HeadKit()
    kit.cluster()
    token = kit.launch("g", [0]).group.token
    assert isinstance(kit.driver("w", role="worker", worker_id="g-0", token=token), Welcome)


def child(kit, peer, token, **fields):
    of = {"role": "worker", "worker_id": "g-0_1", "parent": "g-0", "token": token, **fields}
    return kit.driver(peer, **of)


def test_children_of_a_worker_are_clients_beside_it_and_end_with_it():
    kit = HeadKit()
    kit.cluster()
    token = kit.launch("g", [0]).group.token
    kit.driver("w", role="worker", worker_id="g-0", token=token)
    for number in (1, 2):
        assert isinstance(child(kit, f"c{number}", token, worker_id=f"g-0_{number}"), Welcome)
    kit.driver("watcher")
    kit.tell("watcher", WatchClients(["w", "c1", "c2"]))
    assert not kit.sent(ClientGone, "watcher")
    kit.tell("c1", Goodbye())
    assert [gone.incarnation for gone in kit.sent(ClientGone, "watcher")] == ["c1"]
    kit.tell("a:n0", WorkerExited("g-0", ExitReport("signalled", signal=9)))
    assert [gone.incarnation for gone in kit.sent(ClientGone, "watcher")] == ["c2", "w"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"worker_id": "g-1"}, "worker 'g-1' is no child of worker 'g-0'"),
        ({"worker_id": "g-0"}, "worker 'g-0' is no child of worker 'g-0'"),
        ({"parent": "g-9", "worker_id": "g-9_1"}, "worker 'g-9' is not known here"),
        ({"token": "guess"}, "does not belong to job 'ns'"),
    ],
)
def test_process_that_is_no_child_of_the_worker_is_refused(fields, text):
    kit = HeadKit()
    kit.cluster()
    token = kit.launch("g", [0, 0]).group.token
    refused = child(kit, "c", **{"token": token, **fields})
    assert isinstance(refused, Refuse)
    assert text in refused.text


@pytest.mark.parametrize("body", [GetNodes(0), FindGroup("ns", "g")])
def test_unknown_peer_must_say_hello_first(body):
    kit = HeadKit()
    refused = kit.ask("d9", body)
    assert refused.kind == "hello"
    assert kit.sent(Beat, "d9") == [Beat(HELLO_AGAIN)]


def test_every_peer_may_ask_for_the_status_which_has_no_secrets():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    status = kit.ask("passer-by", GetStatus())
    assert isinstance(status, Status)
    assert [node.report.node_id for node in status.nodes] == ["n0"]
    assert [(group.name, group.state, group.token) for group in status.groups] == [("g", "starting", "")]
    assert status.clients == ["driver d1, process 100, job 'ns'"]
    assert status.drivers == [DriverState("d1", "ns", 100, -1, Program())]
    other = kit.ask("passer-by", GetStatus("other"))
    assert (other.groups, other.clients, other.drivers) == ([], [], [])


def test_a_driver_that_says_who_runs_what_is_named_by_it():
    kit = HeadKit()
    kit.node("n0")
    kit.records()
    program = Program("ann", "gpu-1", "/home/ann/train.py", 5.0)
    kit.driver(program=program)
    assert kit.records() == ["driver d1 (ann's train.py on gpu-1), process 100, job 'ns' is here"]
    (driver,) = kit.ask("passer-by", GetStatus()).drivers
    assert driver.program == program


def test_an_unexpected_request_is_refused():
    kit = HeadKit()
    kit.driver()
    refused = kit.ask("d1", Beat())
    assert refused.kind == "protocol"
    assert "Beat" in refused.text


# --- ends ---


def test_unwatched_driver_ends_without_beats():
    kit = HeadKit()
    kit.driver()
    for _ in range(3):
        kit.wait(9)
        kit.tell("d1", Beat("d1"))
        assert kit.sent(Beat, "d1") == [Beat("epoch", word=kit.now)]
    kit.wait(10)
    assert kit.clients() == 0
    assert "silent for 10 s" in kit.sent(Goodbye, "d1")[0].reason


def test_driver_declared_dead_is_notified_and_refused():
    kit = HeadKit()
    kit.driver()
    kit.wait(11)
    kit.tell("d1", Beat("d1"))
    assert "given up" in kit.sent(Goodbye, "d1")[0].reason
    refused = kit.driver()
    assert refused.kind == "node_lost"
    assert "silent for 10 s" in refused.text


def test_a_driver_on_a_nodes_host_is_watched_and_may_be_silent():
    kit = HeadKit()
    kit.node("n0")
    kit.driver(host="host-n0", pid=42, pid_start=7)
    assert kit.sent(Watch, "a:n0") == [Watch("d1", 42, 7)]
    for _ in range(5):
        kit.wait(9)
        kit.tell("a:n0", Beat())
    assert kit.clients() == 1
    kit.killed("d1", "a:n0")
    assert kit.clients() == 0


def test_goodbye_of_a_driver_ends_its_watch():
    """The process may run on and return as another client many times."""
    kit = HeadKit()
    kit.node("n0")
    kit.driver(host="host-n0")
    kit.tell("d1", Goodbye())
    assert kit.sent(Unwatch, "a:n0") == [Unwatch("d1")]


def test_only_the_watching_agent_may_report_a_process_gone():
    kit = HeadKit()
    kit.node("n0")
    kit.node("n1", ip="10.0.0.2")
    kit.driver(host="host-n0")
    kit.tell("a:n1", ProcessGone("d1"))
    assert kit.clients() == 1
    kit.tell("a:n0", ProcessGone("nobody"))
    assert kit.clients() == 1


def test_driver_needs_beats_after_its_watching_agent_is_gone():
    kit = HeadKit()
    kit.driver(host="host-n0")
    kit.node("n0")
    assert kit.sent(Watch, "a:n0") == [Watch("d1", 100, 5)]
    kit.wait(5)
    kit.tell("a:n0", Goodbye())
    kit.wait(9)
    assert kit.clients() == 1
    kit.wait(1)
    assert kit.clients() == 0


def test_every_agent_of_a_host_watches_its_drivers():
    kit = HeadKit()
    kit.node("n0", host="shared")
    kit.driver(host="shared")
    kit.node("n1", host="shared", ip="10.0.0.2")
    assert len(kit.sent(Watch, "a:n1")) == 1
    kit.tell("a:n0", Goodbye())
    for _ in range(15):
        kit.wait(1)
        kit.tell("a:n1", Beat())
    assert kit.clients() == 1
    kit.killed("d1", "a:n1")
    assert kit.clients() == 0


def test_agent_gets_its_watches_again_after_another_hello():
    kit = HeadKit()
    kit.node("n0")
    kit.driver(host="host-n0")
    kit.node("n0")
    assert len(kit.sent(Watch, "a:n0")) == 1


def test_end_of_a_driver_stops_its_groups_with_a_short_grace():
    kit = HeadKit(orphan_grace_s=0.5)
    kit.cluster(2)
    kit.driver("d2")
    kit.launch("mine", [0, 1])
    kit.launch("theirs", [0], peer="d2")
    kit.tell("d1", Goodbye("done"))
    why = "its owner ended: driver d1, process 100, job 'ns', done"
    assert kit.sent(StopWorkers, "a:n0") == [StopWorkers(["mine-0"], 0.5, why)]
    assert kit.sent(StopWorkers, "a:n1") == [StopWorkers(["mine-1"], 0.5, why)]
    assert kit.group_states() == {"mine": "stopping", "theirs": "starting"}


def test_end_of_a_worker_ends_the_groups_that_it_launched():
    kit = HeadKit()
    kit.cluster()
    token = kit.launch("g", [0]).group.token
    kit.driver("w", role="worker", worker_id="g-0", token=token)
    assert isinstance(kit.launch("child", [0], peer="w"), Launched)
    kit.exited("a:n0", "g-0", exit_code=1)
    why = "its owner ended: worker g:0 on node n0 exited with code 1"
    assert kit.sent(StopWorkers, "a:n0") == [StopWorkers(["child-0"], kit.timing.orphan_grace_s, why)]


@pytest.mark.parametrize("agent", ["new", "of protocol 5"])
def test_users_of_a_group_are_notified_of_its_owners_end(agent):
    kit = HeadKit()
    kit.cluster()
    token = kit.launch("g", [0]).group.token
    kit.driver("w", role="worker", worker_id="g-0", token=token, host="host-n0")
    kit.launch("child", [0], peer="w")
    kit.ask("d1", FindGroup("ns", "child"))
    kit.killed("w", "a:n0")  # agentd sees the end before the template reports its cause
    (stop,) = kit.sent(StopWorkers, "a:n0")
    assert stop.reason == "its owner ended: worker g:0 on node n0"
    kit.exited("a:n0", "g-0", kind="signalled", signal=9)
    kit.exited("a:n0", "child-0", kind="stopped", reason=stop.reason if agent == "new" else "")
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert changed.workers[0].exit.reason == ("its owner ended: worker g:0 on node n0 was ended by signal 9 (SIGKILL)")


def test_a_job_is_not_open_to_other_namespaces():
    kit = HeadKit()
    kit.cluster()
    kit.driver("d2", namespace="else")
    refused = kit.ask("d2", FindGroup("ns", "g"))
    assert refused.kind == "authentication"
    assert "'else'" in refused.text


# --- the whole cluster ---


def test_driver_may_end_an_embedded_cluster_only():
    kit = HeadKit()
    kit.cluster()
    assert kit.ask("d1", StopCluster()).kind == "usage"


def test_cluster_ends_after_its_groups():
    kit = HeadKit(embedded=True)
    kit.cluster()
    kit.launch("g", [0])
    assert kit.ask("d1", StopCluster()) is None
    assert kit.sent(StopWorkers, "a:n0") == [StopWorkers(["g-0"], kit.timing.stop_grace_s)]
    assert kit.launch("late", [0]).kind == "usage"
    kit.exited("a:n0", "g-0")
    assert kit.answers() == [("d1", Done())]
    assert kit.ended()


def test_an_idle_cluster_ends_at_once():
    kit = HeadKit(embedded=True)
    kit.driver()
    assert kit.ask("d1", StopCluster()) == Done()
    assert kit.ended()


def test_administrator_ends_a_cluster_for_good():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    assert kit.ask("somebody", StopCluster(by="ann@h", reason="maintenance")) is None
    assert kit.sent(StopWorkers, "a:n0") == [StopWorkers(["g-0"], kit.timing.stop_grace_s)]
    assert kit.launch("late", [0]).kind == "usage"
    kit.exited("a:n0", "g-0")
    assert kit.answers() == [("somebody", Done())]
    assert EndCluster("ann@h ended the cluster: maintenance") in kit.out


def test_only_its_own_driver_may_end_a_private_cluster():
    kit = HeadKit(embedded=True)
    kit.cluster()
    refused = kit.ask("somebody", StopCluster(by="ann@h"))
    assert refused.kind == "usage"
    assert "ends with that script" in refused.text


def test_clients_are_notified_of_the_heads_end():
    kit = HeadKit()
    kit.driver("d1")
    kit.driver("d2")
    assert [command.peer for command in kit.head.farewell("bye")] == [b"d1", b"d2"]


def test_agents_and_clients_are_notified_of_the_heads_restart():
    kit = HeadKit()
    kit.node("n0")
    kit.driver("d1")
    goodbye = Goodbye("SIGTERM", restarting=True)
    assert kit.head.restarting("SIGTERM") == [Notify(b"a:n0", goodbye), Notify(b"d1", goodbye)]


# --- output of workers ---


def test_output_goes_to_the_jobs_first_driver_and_credit_returns():
    kit = HeadKit()
    kit.cluster()
    kit.driver("d2")
    lines = LogLines("ns", "n0-name", [("g:0", "out", "hello")])
    kit.tell("a:n0", lines)
    assert kit.sent(LogLines) == [lines]
    assert kit.sent(LogLines, "d1") == [lines]
    kit.tell("d1", LogCredit("ns", "n0-name", 5))
    assert kit.sent(LogCredit, "a:n0") == [LogCredit("ns", "n0-name", 5)]
    kit.tell("d1", LogCredit("ns", "other", 5))
    assert kit.sent(LogCredit) == []


def test_nodes_of_one_name_share_the_credit_of_their_lines():
    kit = HeadKit()
    kit.cluster()
    kit.node("n1")
    lines = LogLines("ns", "host", [("g:0", "out", "hello")])
    for agent in ("a:n0", "a:n1", "a:n1"):
        kit.tell(agent, lines)
    got = Counter()
    for _ in range(4):
        kit.tell("d1", LogCredit("ns", "host", lines.cost))
        for agent in ("a:n0", "a:n1"):
            got[agent] += sum(credit.chars for credit in kit.sent(LogCredit, agent))
    assert got == {"a:n0": lines.cost, "a:n1": 2 * lines.cost}


def test_credit_of_lines_under_way_comes_back_when_their_driver_ends():
    kit = HeadKit()
    kit.cluster()
    kit.driver("d2")
    lines = LogLines("ns", "n0-name", [("g:0", "out", "hello"), ("g:0", "err", "x")])
    kit.tell("a:n0", lines)
    kit.tell("d1", LogCredit("ns", "n0-name", 3))
    kit.tell("d2", Goodbye("done"))
    assert kit.sent(LogCredit) == []
    kit.tell("d1", Goodbye("done"))
    assert kit.sent(LogCredit, "a:n0") == [LogCredit("ns", "n0-name", lines.cost - 3)]


def test_credit_finds_a_node_that_registered_anew():
    kit = HeadKit()
    kit.cluster()
    lines = LogLines("ns", "n0-name", [("g:0", "out", "hello")])
    kit.tell("a:n0", lines)
    kit.node("n0", "n0-2", is_head=True)
    kit.tell("d1", LogCredit("ns", "n0-name", lines.cost))
    assert kit.sent(LogCredit, "a:n0n0-2") == [LogCredit("ns", "n0-name", lines.cost)]


def test_output_without_a_driver_is_dropped_and_its_credit_returned():
    kit = HeadKit()
    kit.node("n0")
    lines = LogLines("ns", "n0-name", [("g:0", "out", "hello"), ("g:0", "err", "x")])
    kit.tell("a:n0", lines)
    assert kit.sent(LogCredit, "a:n0") == [LogCredit("ns", "n0-name", lines.cost)]


def test_log_names_clients_that_came_went_and_were_refused():
    kit = HeadKit()
    kit.node("n0")
    lines = kit.records()
    kit.driver()
    lines += kit.records()
    kit.driver("d2", role="king")
    lines += kit.records()
    kit.tell("d1", Goodbye("done"))
    lines += kit.records()
    kit.tell("a:n0", Goodbye("off"))
    lines += kit.records()
    assert lines == [
        "node n0 (10.0.0.1) is here (rlinf-actors 1.0), incarnation n0-1",
        "driver d1, process 100, job 'ns' is here",
        "refused d2 (authentication): 'king' is no role; the roles are driver, worker",
        "driver d1, process 100, job 'ns' has ended: done",
        "node n0 (10.0.0.1) is gone: off",
    ]


def test_unexpected_notices_are_counted():
    kit = HeadKit()
    kit.cluster()
    kit.tell("a:n0", LogCredit("ns", "x", 1))
    kit.tell("d1", ProcessGone("d1"))
    assert kit.head.unexpected == 2
    assert kit.clients() == 1
