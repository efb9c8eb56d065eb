"""Registration, silence, incarnations, ranks and waiting for nodes."""

from __future__ import annotations

import pytest
from head_kit import HeadKit, agent_hello, client_hello
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.head.commands import Refuse, TimerDue
from rlinf_actors.head.timers import TURN
from rlinf_actors.wire.agent_messages import HELLO_AGAIN, Beat, Goodbye, Welcome
from rlinf_actors.wire.client_messages import Nodes, WorkerChanged
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import HardwareReport, ResourceReport


def gpus(kind: str = "NV_GPU") -> list[ResourceReport]:
    return [ResourceReport(kind, [HardwareReport(kind, "X")])]


def order(answer) -> list[tuple[int, str]]:
    assert isinstance(answer, Nodes), answer
    return [(state.rank, state.report.node_id) for state in answer.nodes]


# --- registration ---


def test_a_hello_is_welcomed_with_the_timers():
    kit = HeadKit(beat_s=0.5, lease_s=7.0)
    assert kit.node("n0") == Welcome("epoch", "1.0", 0.5, 7.0, "")
    assert kit.node_states() == {"n0": "ready"}


@pytest.mark.parametrize(
    ("hello", "who"), [(agent_hello, "this agentd"), (client_hello, "this driver")], ids=["agent", "driver"]
)
@pytest.mark.parametrize(
    ("protocol", "advice"), [(PROTOCOL + 1, "upgrade the head first"), (PROTOCOL - 1, "upgrade {who}")]
)
def test_peer_of_another_protocol_learns_what_to_upgrade(hello, who, protocol, advice):
    kit = HeadKit()
    refused = kit.ask("p", hello("n0", version="9.9", protocol=protocol))
    assert isinstance(refused, Refuse)
    assert refused.kind == "protocol"
    assert f"{who} is rlinf-actors 9.9 (protocol {protocol})" in refused.text
    assert f"the head is 1.0 (protocol {PROTOCOL})" in refused.text
    assert refused.text.endswith(advice.format(who=who))


def test_beat_is_answered_and_an_unknown_sender_asked_for_a_hello():
    kit = HeadKit()
    kit.node("n0")
    kit.tell("a:n0", Beat("n0-1"))
    assert kit.sent(Beat, "a:n0") == [Beat("epoch", word=kit.head.now)]
    kit.tell("a:n9", Beat("n9-1"))
    assert kit.sent(Beat, "a:n9") == [Beat(HELLO_AGAIN)]


def test_silent_node_becomes_suspect_and_is_lost_at_the_lease():
    kit = HeadKit()
    kit.node("n0")
    kit.wait(2.9)
    assert kit.node_states() == {"n0": "ready"}
    kit.wait(0.2)
    assert kit.node_states() == {"n0": "suspect"}
    kit.wait(6.8)
    assert kit.node_states() == {"n0": "suspect"}
    kit.wait(0.2)
    assert kit.node_states() == {"n0": "lost"}


def test_suspect_node_is_ready_after_its_next_beat():
    kit = HeadKit()
    kit.node("n0")
    kit.wait(5)
    kit.tell("a:n0", Beat("n0-1"))
    assert kit.node_states() == {"n0": "ready"}
    kit.wait(9.9)
    assert kit.node_states() == {"n0": "suspect"}


def test_a_silent_agent_without_a_connection_is_lost_before_its_lease():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    kit.unreachable("a:n0")
    assert kit.node_states() == {"n0": "ready"}  # it reconnects
    kit.wait(3)
    assert kit.sent(Beat, "a:n0") == [Beat("")]
    kit.unreachable("a:n0")
    assert kit.node_states() == {"n0": "lost"}
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert "silent for 3 s and is not connected" in changed.workers[0].exit.reason
    assert kit.node("n0").kind == "node_lost"


def test_stall_of_the_head_costs_no_node_its_lease():
    kit = HeadKit()
    kit.node("n0")
    kit.driver()
    kit.stall(60)
    kit.wait(1)
    assert kit.node_states() == {"n0": "ready"}
    assert kit.clients() == 1


def test_lost_incarnation_is_refused_and_a_new_one_accepted():
    kit = HeadKit()
    kit.node("n0")
    kit.wait(11)
    refused = kit.node("n0")
    assert isinstance(refused, Refuse)
    assert refused.kind == "node_lost"
    assert "incarnation n0-1 of this node was declared lost after 10 s of silence" in refused.text
    assert isinstance(kit.node("n0", "n0-2"), Welcome)
    assert kit.node_states() == {"n0": "ready"}


def test_a_restarted_agent_replaces_its_old_incarnation():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    assert isinstance(kit.node("n0", "n0-2"), Welcome)
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert changed.workers[0].exit.kind == "node_lost"
    assert "started anew" in changed.workers[0].exit.reason
    refused = kit.node("n0")
    assert refused.kind == "node_lost"
    assert "is served by a newer agentd" in refused.text


def test_goodbye_frees_node_and_rank_at_once():
    kit = HeadKit()
    kit.node("n0", rank=0)
    kit.tell("a:n0", Goodbye("stopped"))
    assert kit.node_states() == {}
    assert isinstance(kit.node("n1", rank=0), Welcome)
    assert kit.node("n0").kind == "node_lost"


def test_repeated_hello_of_an_incarnation_is_accepted():
    kit = HeadKit()
    kit.cluster()
    kit.wait(5)
    assert isinstance(kit.node("n0", ip="10.0.0.1", is_head=True), Welcome)
    assert kit.node_states() == {"n0": "ready"}
    assert kit.ranks() == {"n0": 0}


# --- ranks ---


def test_ranks_follow_head_hardware_and_address():
    kit = HeadKit()
    kit.node("cpu", ip="10.0.0.1")
    kit.node("b", ip="10.0.0.20", resources=gpus())
    kit.node("a", ip="10.0.0.3", resources=gpus())
    kit.node("h", ip="10.0.0.99", is_head=True)
    kit.driver()
    assert order(kit.nodes(4)) == [(0, "h"), (1, "a"), (2, "b"), (3, "cpu")]


def test_explicit_ranks_are_used_unchanged():
    kit = HeadKit()
    kit.node("x", rank=1)
    kit.node("y", rank=0)
    kit.driver()
    assert order(kit.nodes(2)) == [(0, "y"), (1, "x")]


def test_taken_explicit_rank_is_refused_with_both_nodes_named():
    kit = HeadKit()
    kit.node("x", rank=1)
    refused = kit.node("y", rank=1, ip="10.0.0.7")
    assert refused.kind == "config"
    assert refused.path == "RLINF_NODE_RANK"
    assert "x" in refused.text
    assert "y (10.0.0.7)" in refused.text
    assert kit.node_states() == {"x": "ready"}


@pytest.mark.parametrize(("first", "second"), [(0, None), (None, 0)])
def test_ranks_on_some_nodes_only_are_refused(first, second):
    kit = HeadKit()
    kit.node("x", rank=first)
    refused = kit.node("y", rank=second)
    assert refused.kind == "config"
    assert "on all nodes or on none" in refused.text


def test_the_rank_of_a_lost_node_is_held_for_a_while():
    kit = HeadKit(rank_hold_s=120.0)
    kit.node("x", rank=0)
    kit.wait(10 + 20)
    refused = kit.node("y", rank=0)
    assert refused.kind == "unreachable"  # the agent tries again
    assert "rank 0 belongs to node x" in refused.text
    assert "lost 20 s ago" in refused.text
    assert "in 100 s" in refused.text
    kit.wait(100)
    assert isinstance(kit.node("y", rank=0), Welcome)


def test_a_lost_node_gets_its_own_rank_back_at_once():
    kit = HeadKit()
    kit.cluster(2)
    kit.wait(9)
    kit.tell("a:n0", Beat())
    kit.tell("d1", Beat())
    kit.wait(2)
    assert kit.node_states() == {"n0": "ready", "n1": "lost"}
    kit.node("n1", "n1-2", ip="10.0.0.2")
    assert kit.ranks() == {"n0": 0, "n1": 1}
    assert order(kit.nodes(2)) == [(0, "n0"), (1, "n1")]


def test_ranks_are_fixed_and_later_nodes_get_the_next_ones():
    kit = HeadKit()
    kit.node("b", ip="10.0.0.9")
    kit.driver()
    kit.nodes(1)
    kit.node("a", ip="10.0.0.2")
    kit.node("h", ip="10.0.0.1", is_head=True)
    assert order(kit.nodes(3)) == [(0, "b"), (1, "h"), (2, "a")]


def test_request_for_fewer_nodes_gets_the_first_ones_with_a_warning():
    kit = HeadKit()
    for n in (3, 1, 2):
        kit.node(f"n{n}", ip=f"10.0.0.{n}")
    kit.driver()
    answer = kit.nodes(2)
    assert order(answer) == [(0, "n1"), (1, "n2")]
    assert answer.warnings == ["3 nodes have registered and num_nodes is 2; not used: n3 (10.0.0.3)"]
    assert kit.ranks()["n3"] == -1
    assert order(kit.nodes(3))[2] == (2, "n3")


# --- waiting ---


def test_zero_nodes_are_answered_at_once():
    kit = HeadKit()
    kit.driver()
    assert kit.nodes(0) == Nodes([])
    kit.node("n0")
    assert order(kit.nodes(0)) == [(0, "n0")]


def test_request_for_nodes_is_answered_when_the_last_node_registers():
    kit = HeadKit()
    kit.node("n0", ip="10.0.0.1")
    kit.driver()
    assert kit.nodes(2) is None
    kit.wait(2)
    kit.node("n1", ip="10.0.0.2")
    assert [(peer, order(body)) for peer, body in kit.answers() if peer == "d1"] == [("d1", [(0, "n0"), (1, "n1")])]
    kit.tell("a:n0", Beat())
    assert kit.answers() == []


def test_timeout_names_missing_ranks_and_the_nodes_last_seen():
    kit = HeadKit(lease_s=4.0)
    kit.cluster(2)
    kit.wait(3)
    kit.tell("a:n0", Beat())
    kit.tell("d1", Beat())
    kit.wait(2)  # n1 is lost now
    kit.nodes(3, timeout=3.0)
    kit.tell("a:n0", Beat())
    kit.wait(3.5)
    (refused,) = kit.refusals()
    assert refused.kind == "timeout"
    assert refused.missing_ranks == (1, 2)
    assert refused.text.startswith(
        "1 of 3 nodes after 3 s; missing ranks 1 (n1 (10.0.0.2), last seen 8 s ago), 2 (never seen)"
    )


def test_gap_in_explicit_ranks_is_awaited():
    kit = HeadKit()
    kit.node("x", rank=0)
    kit.node("z", rank=2)
    kit.driver()
    assert kit.nodes(2) is None
    kit.node("y", rank=1)
    assert [order(body) for peer, body in kit.answers() if peer == "d1"] == [[(0, "x"), (1, "y")]]


def test_request_for_as_many_nodes_as_one_that_has_ended_is_answered():
    kit = HeadKit()
    kit.cluster(1)
    kit.nodes(2)
    kit.tell("d1", Goodbye("over"))
    kit.driver("d2")
    assert kit.nodes(2, peer="d2") is None
    kit.node("n1")
    assert [peer for peer, _ in kit.answers()] == ["d2", "a:n1"]


def test_request_for_nodes_ends_with_its_client():
    kit = HeadKit()
    kit.driver()
    kit.nodes(1, timeout=5.0)
    kit.tell("d1", Goodbye())
    kit.wait(6)
    assert kit.refusals() == []


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("hello"), st.integers(0, 3), st.sampled_from(["1", "2"]), st.sampled_from([None, 0, 1, 2])
            ),
            st.tuples(st.just("goodbye"), st.integers(0, 3), st.just("1"), st.none()),
            st.tuples(st.sampled_from(["wait", "nodes", "restart"]), st.integers(0, 3), st.just("1"), st.none()),
        ),
        max_size=25,
    )
)
def test_short_and_long_check_of_a_rank_agree(steps):
    short, long = HeadKit(lease_s=5.0, rank_hold_s=8.0), HeadKit(lease_s=5.0, rank_hold_s=8.0)
    for what, n, incarnation, rank in steps:
        answers = []
        for kit in (short, long):
            if kit is long:
                kit.head.nodes._may_conflict = lambda node: True
            if what == "hello":
                answers.append(kit.node(f"n{n}", incarnation, rank=rank))
            elif what == "goodbye":
                answers.append(kit.tell(f"a:n{n}{incarnation}", Goodbye()))
            elif what == "wait":
                answers.append(kit.wait(2.0 * n))
            elif what == "nodes":
                kit.driver()
                answers.append(kit.nodes())
            else:
                kit.start()
        assert answers[1:] == answers[:1], f"{what} n{n}"


def test_checks_for_silence_of_nodes_heard_together_share_a_timer():
    kit = HeadKit()
    for n in range(50):
        kit.node(f"n{n}", ip=f"10.0.0.{n}")
        kit.now += 0.001
    ticks = 0
    while kit.head.next_deadline() < 1004.0:
        kit.now = kit.head.next_deadline()
        kit.head.handle(TimerDue(), kit.now)
        ticks += 1
    assert ticks <= 2 + 50 // TURN
    assert set(kit.node_states().values()) == {"suspect"}
