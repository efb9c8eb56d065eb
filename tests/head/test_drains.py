"""Draining a node: refused launches, notifications, the end and the duration of a drain."""

from __future__ import annotations

import msgspec
import pytest
from head_kit import HeadKit, agent_hello, running, specs

from rlinf_actors import RestartPolicy
from rlinf_actors.wire.agent_messages import Beat, Goodbye, StartWorkers
from rlinf_actors.wire.client_messages import Drained, DrainNode, GetEvents, Launch, Nodes, Warn, WorkerChanged
from rlinf_actors.wire.values import Claim, Endpoint, NodeState


def drain(kit: HeadKit, node: str = "n1", reason: str = "new disk", undo: bool = False) -> NodeState:
    answer = kit.ask("cli", DrainNode(node, "kim@lab", reason, undo))
    assert isinstance(answer, Drained), answer
    assert answer.node is not None
    return answer.node


def told(kit: HeadKit) -> list[str]:
    """The kinds of events about drains."""
    return [event.kind for event in kit.ask("cli", GetEvents()).events if "drain" in event.kind]


def two_nodes() -> HeadKit:
    kit = HeadKit()
    kit.cluster(2)
    return kit


def test_drained_node_starts_no_worker_and_the_refusal_says_why():
    kit = two_nodes()
    state = drain(kit)
    assert (state.state, state.draining) == ("draining", "new disk (by kim@lab)")
    refused = kit.launch("g", [0, 1])
    assert (refused.kind, refused.text) == (
        "placement",
        "node 1, where g:1 was placed, is n1 (10.0.0.2), and that is draining: new disk (by kim@lab): "
        "place the group elsewhere",
    )
    assert kit.group_states() == {}
    assert kit.launch("h", [0]).group.state == "starting"


def test_workers_on_a_drained_node_run_on_and_their_owner_is_warned_once():
    kit = two_nodes()
    kit.launch("g", [0, 1, 1])
    for rank in range(3):
        kit.ready(f"a:n{min(rank, 1)}", f"g-{rank}")
    drain(kit)
    (warning,) = kit.sent(Warn)
    assert warning.text.startswith("node n1 (10.0.0.2) is being drained: new disk (by kim@lab). Group 'g' (ranks 1, 2 ")
    assert [peer for peer, _ in kit.answers()] == ["cli"]
    kit.wait(2.0)
    assert kit.sent(Warn) == []
    assert kit.group_states() == {"g": "running"}


def test_node_is_drained_after_its_last_workers_end():
    kit = two_nodes()
    kit.launch("g", [0, 1])
    drain(kit)
    assert told(kit) == ["node_draining"]
    kit.exited("a:n0", "g-0")
    assert told(kit) == ["node_draining"]
    kit.exited("a:n1", "g-1")
    assert told(kit) == ["node_draining", "node_drained"]
    drain(kit, reason="two disks")
    assert told(kit) == ["node_draining", "node_drained", "node_draining", "node_drained"]


def test_drained_node_does_not_count_until_the_drain_ends():
    kit = HeadKit()
    kit.node("n0", ip="10.0.0.1", is_head=True)
    kit.node("n1", ip="10.0.0.2")
    kit.driver()
    drain(kit)
    assert kit.nodes(2, timeout=100.0) is None
    assert len(kit.nodes(1).nodes) == 1
    drain(kit, undo=True)
    ((_, answer),) = [(peer, body) for peer, body in kit.answers() if isinstance(body, Nodes)]
    assert [node.report.node_id for node in answer.nodes] == ["n0", "n1"]
    assert told(kit)[-1] == "node_undrained"
    assert kit.launch("g", [1]).group.state == "starting"


def test_timeout_reports_that_the_missing_rank_is_drained():
    kit = two_nodes()
    drain(kit, "n0")
    assert kit.nodes(1, timeout=5.0) is None
    kit.wait(5.0)
    (refused,) = kit.refusals()
    assert "missing rank 0 (n0 (10.0.0.1) is draining: new disk (by kim@lab))" in refused.text


@pytest.mark.parametrize("incarnation", ["", "n1-2"])
def test_drain_survives_a_restart_of_agentd(incarnation):
    kit = two_nodes()
    drain(kit)
    kit.node("n1", incarnation, ip="10.0.0.2")
    assert kit.node_states()["n1"] == "draining"
    kit.tell(f"a:n1{incarnation}", Beat("x"))
    assert kit.node_states()["n1"] == "draining"
    assert kit.launch("g", [1]).kind == "placement"


def test_drain_of_an_absent_node_is_kept_and_can_be_undone():
    kit = two_nodes()
    drain(kit)
    kit.tell("a:n1", Goodbye("off"))
    assert "n1" not in kit.node_states()
    answer = kit.ask("cli", DrainNode("n1", "kim@lab", undo=True))
    assert answer == Drained(None)
    kit.node("n1", "n1-2", ip="10.0.0.2")
    assert kit.node_states()["n1"] == "ready"


def test_lost_node_returns_draining():
    kit = two_nodes()
    drain(kit)
    kit.wait(11.0)
    assert kit.node_states()["n1"] == "lost"
    kit.node("n1", "n1-2", ip="10.0.0.2")
    assert kit.node_states()["n1"] == "draining"


def test_launch_that_waits_for_a_drained_node_is_refused_at_once():
    kit = two_nodes()
    arm = [Claim("Arm:1", "Arm 1")]
    for name, wait_s in (("g", 0.0), ("h", 60.0)):
        workers = [msgspec.structs.replace(spec, claims=arm) for spec in specs(name, [1])]
        kit.ask("d1", Launch("ns", name, "m:C", workers, wait_s=wait_s))
    drain(kit)
    (refused,) = kit.refusals()
    assert (refused.kind, "h:0 was placed" in refused.text) == ("placement", True)


@pytest.mark.parametrize(
    ("node", "undo", "said"), [("n9", False, "not known"), ("n9", True, "not known"), ("n1", True, "not being drained")]
)
def test_impossible_drain_is_refused(node, undo, said):
    kit = two_nodes()
    refused = kit.ask("cli", DrainNode(node, "kim@lab", undo=undo))
    assert refused.kind == "usage"
    assert said in refused.text


def test_restarted_head_knows_drains_and_logs_them():
    kit = two_nodes()
    kit.launch("g", [1])
    kit.ready("a:n1", "g-0")
    drain(kit)
    kit.restart()
    kit.node("n0", ip="10.0.0.1", is_head=True)
    there = [running(specs("g", [1])[0], "d1", endpoint=Endpoint("h", "ipc://x"), pid=7)]
    kit.ask("a:n1", agent_hello("n1", ip="10.0.0.2", workers=there))
    kit.driver(token="token1")
    assert kit.node_states() == {"n0": "ready", "n1": "draining"}
    assert kit.launch("h", [1]).kind == "placement"
    assert told(kit) == ["node_draining"]
    kit.exited("a:n1", "g-0")
    assert told(kit) == ["node_draining", "node_drained"]
    drain(kit, undo=True)
    kit.restart()
    kit.node("n1", ip="10.0.0.2")
    assert kit.node_states()["n1"] == "ready"


def test_drain_that_cannot_be_written_is_kept_with_a_warning():
    kit = two_nodes()
    kit.full = True
    answer = kit.ask("cli", DrainNode("n1", "kim@lab"))
    assert answer.node.draining == "no reason was given (by kim@lab)"
    assert "could not write" in answer.warning


def test_failed_rank_is_not_restarted_on_a_drained_node_and_keeps_its_cause():
    kit = two_nodes()
    policy = RestartPolicy.on_failure(backoff_s=1)
    kit.ask("d1", Launch("ns", "g", "m:C", [msgspec.structs.replace(specs("g", [1])[0], restart=policy)]))
    kit.ready("a:n1", "g-0")
    drain(kit)
    kit.exited("a:n1", "g-0", kind="signalled", exit_code=None, signal=9)
    assert told(kit) == ["node_draining"]
    kit.wait(1.0)
    assert kit.sent(StartWorkers) == []
    ((last,),) = [notice.workers for notice in kit.sent(WorkerChanged, "d1")]
    assert (last.state, last.exit.signal) == ("gone", 9)
    assert last.exit.reason.endswith("it is not started again: its node is draining: new disk (by kim@lab)")
    assert told(kit) == ["node_draining", "node_drained"]
