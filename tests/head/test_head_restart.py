"""A restarted head: returning nodes and clients in any order, waiting requests, and refusals."""

from __future__ import annotations

from collections import deque

import pace
import pytest
from head_kit import HeadKit, agent_hello, client_hello, running, specs
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from restart_kit import UP, alone, back, cluster, handle, returns

from rlinf_actors.head.client_ends import SOON_S
from rlinf_actors.head.commands import Refuse
from rlinf_actors.wire.agent_messages import Beat, Goodbye, ProcessGone, StopWorkers, Welcome
from rlinf_actors.wire.client_messages import (
    EStop,
    EStopped,
    FindGroup,
    GetNodes,
    Handles,
    Launch,
    Launched,
    Nodes,
    WorkerChanged,
)
from rlinf_actors.wire.values import Claim, ExitReport

# --- ranks, nodes and epochs ---


def test_ranks_are_kept_in_any_order_of_return():
    kit = cluster(3)
    ranks = kit.ranks()
    kit.restart()
    assert kit.ranks() == ranks
    for node in (2, 0, 1):
        alone(kit, node)
        assert kit.ranks() == ranks
    kit.node("n9", ip="10.0.0.0")
    returns(kit)
    kit.nodes(4)
    assert kit.ranks() == {**ranks, "n9": 3}


def test_each_head_has_its_own_epoch():
    kit = cluster(1)
    assert alone(kit, 0).epoch == "epoch"
    kit.restart()
    assert alone(kit, 0).epoch == "epoch2"


def test_awaited_nodes_are_shown_as_registering():
    kit = cluster(2)
    kit.restart()
    alone(kit, 0)
    assert kit.node_states() == {"n0": "ready", "n1": "registering"}


def test_node_that_returns_too_late_is_lost_and_its_rank_held():
    kit = cluster(2, lease_s=10, rank_hold_s=60)
    kit.restart()
    for _ in range(12):
        alone(kit, 0)
        kit.wait(0.9)
    assert kit.node_states() == {"n0": "ready", "n1": "lost"}
    refused = back(kit, 1)
    assert refused.kind == "node_lost"
    assert "did not come back within 10 s after the head was restarted; come back as a new one" in refused.text
    assert kit.ranks() == {"n0": 0, "n1": 1}
    assert isinstance(back(kit, 1, incarnation="n1-2"), Welcome)
    assert kit.ranks() == {"n0": 0, "n1": 1}


def test_a_rank_of_a_node_that_never_returns_is_free_after_its_hold():
    kit = cluster(2, lease_s=10, rank_hold_s=60)
    kit.restart()
    for _ in range(80):
        alone(kit, 0)
        kit.wait(0.9)
    assert kit.node_states() == {"n0": "ready"}
    kit.restart()
    assert kit.ranks() == {"n0": 0}


def test_explicit_rank_of_an_awaited_node_is_reserved():
    kit = HeadKit()
    kit.node("n0", rank=0)
    kit.node("n1", rank=1)
    kit.restart()
    kit.node("n0", rank=0)
    refused = kit.node("thief", rank=1)
    assert refused.kind == "unreachable"
    assert "belongs to node n1 (10.0.0.1), which a head that was restarted 0 s ago awaits" in refused.text
    assert isinstance(kit.node("n1", rank=1), Welcome)


# --- lost nodes and dead drivers stay refused ---


def test_node_that_an_earlier_head_declared_lost_is_refused():
    kit = cluster(2)
    for _ in range(12):
        alone(kit, 0)
        kit.wait(0.9)
    assert kit.node_states()["n1"] == "lost"
    kit.restart()
    refused = back(kit, 1)
    assert refused.kind == "node_lost"
    assert "incarnation n1-1 of this node was declared lost after 10 s of silence" in refused.text


def test_restarted_head_refuses_the_older_of_a_nodes_two_agentds():
    kit = cluster(1)
    kit.node("n0", "n0-2")
    kit.restart()
    kit.node("n0", "n0-2")
    assert "is served by a newer agentd" in kit.node("n0", "n0-1").text
    assert kit.node_states() == {"n0": "ready"}


def test_restarted_agentd_replaces_its_earlier_incarnation():
    kit = cluster(1)
    kit.restart()
    assert isinstance(kit.node("n0", "n0-2"), Welcome)
    assert "served by a newer agentd" in kit.node("n0", "n0-1").text


def test_restarted_head_refuses_a_driver_that_was_declared_dead():
    kit = cluster(1)
    for _ in range(12):
        alone(kit, 0)
        kit.wait(0.9)
    kit.restart()
    alone(kit, 0)
    refused = returns(kit)
    assert refused.kind == "node_lost"
    assert "the head has given up on this driver: it was silent for 10 s" in refused.text


def test_restarted_head_stops_workers_of_a_driver_declared_dead():
    kit = cluster(1)
    for _ in range(12):
        back(kit, 0, 1)
        kit.wait(0.9)
    kit.restart()
    back(kit, 0, 1)
    assert kit.sent(StopWorkers) == [StopWorkers(["g-0"], kit.timing.orphan_grace_s, "its owner ended")]


@pytest.mark.parametrize("first", ["the end", "its workers"])
def test_driver_reported_as_ended_has_a_short_time_to_return(first):
    """The agent's report may be false."""
    kit = cluster(2)
    kit.restart()
    if first == "the end":
        alone(kit, 0)
        kit.tell("a:n0", ProcessGone("d1"))
        back(kit, 1)
    else:
        back(kit, 1)
        kit.node("n0", ip="10.0.0.1", is_head=True, watched=["d1"])
        kit.tell("a:n0", ProcessGone("d1"))
    assert kit.sent(StopWorkers) == []
    kit.wait(SOON_S)
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["g-1"]]
    assert returns(kit).kind == "node_lost"


def test_name_of_a_group_that_ended_with_its_driver_and_head_is_free():
    """A driver and the head are killed together; the agent stops the workers before the next head starts."""
    kit = cluster(1)
    kit.restart()
    ended = ExitReport("stopped", reason="its owner has ended, and the head does not answer")
    back(kit, 0, 1, exit=ended)
    kit.driver("d2")
    assert isinstance(kit.launch("g", [0], "d2", launch="next"), Launched)
    kit.tell("a:n0", ProcessGone("d1"))
    kit.ready("a:n0", "next-0")
    kit.wait(SOON_S)
    assert kit.sent(StopWorkers) == []
    assert returns(kit).kind == "node_lost"


def test_driver_that_another_agent_watches_is_awaited_despite_a_report():
    kit = cluster(2)
    kit.restart()
    kit.node("n0", ip="10.0.0.1", is_head=True)
    kit.tell("a:n0", ProcessGone("d1"))
    there = running(specs("g", [0, 1])[1], "d1", endpoint=UP, pid=7)
    kit.ask("a:n1", agent_hello("n1", ip="10.0.0.2", workers=[there], watched=["d1"]))
    for _ in range(30):
        kit.tell("a:n1", Beat())
        kit.wait(1)
        assert kit.sent(StopWorkers) == []
    assert isinstance(returns(kit), Welcome)


def test_living_driver_is_welcome_despite_a_report_of_its_end():
    kit = cluster(2)
    kit.restart()
    back(kit, 1)
    kit.node("n0", ip="10.0.0.1", is_head=True, watched=["d1"])
    kit.tell("a:n0", ProcessGone("d1"))
    assert isinstance(returns(kit), Welcome)
    assert kit.sent(StopWorkers) == []


def test_driver_that_said_goodbye_leaves_no_tombstone():
    kit = cluster(1)
    kit.tell("d1", Goodbye())
    assert ("client", "d1") not in kit.disk.given_up


# --- emergency stop ---


def arm(group: str):
    return [replace(spec, claims=(Claim("Franka:1", "Franka 1"),)) for spec in specs(group, [0])]


def test_an_emergency_stop_survives_the_head():
    kit = cluster(1)
    assert isinstance(kit.ask("o", EStop("kim@lab", "smoke")), EStopped)
    kit.restart()
    alone(kit, 0)
    returns(kit)
    refused = kit.ask("d1", Launch("ns", "arm", "m:C", arm("arm")))
    assert "robots are stopped: emergency stop by kim@lab: smoke" in refused.text
    assert kit.ask("o", EStop("kim@lab", release=True)).stopped == []
    kit.restart()
    alone(kit, 0)
    returns(kit)
    assert isinstance(kit.ask("d1", Launch("ns", "arm", "m:C", arm("arm"))), Launched)


def test_robot_workers_that_return_during_an_emergency_stop_are_stopped():
    kit = cluster(1)
    kit.ask("o", EStop("kim@lab"))
    kit.restart()
    returns(kit)
    kit.node("n0", ip="10.0.0.1", is_head=True, workers=[running(arm("arm")[0], "d1", endpoint=UP)])
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["arm-0"]]


def test_emergency_stop_that_cannot_be_written_is_answered_with_a_warning():
    kit = cluster(1)
    kit.launch("arm", [0])
    kit.full = True
    answer = kit.ask("o", EStop("kim@lab"))
    assert "the head could not write that down" in answer.warning
    assert answer.stopped != []
    assert kit.ask("o", EStop("kim@lab", release=True)).warning != ""


def test_stop_orders_to_robots_precede_the_write_to_disk():
    from rlinf_actors.head.commands import Notify, Persist, RequestReceived

    kit = cluster(1)
    kit.ask("d1", Launch("ns", "arm", "m:C", arm("arm")))
    out = kit.head.handle(RequestReceived(b"o", 99, EStop("kim@lab")), kit.now)
    stop = next(n for n, c in enumerate(out) if isinstance(c, Notify) and isinstance(c.body, StopWorkers))
    assert stop < next(n for n, c in enumerate(out) if isinstance(c, Persist))


# --- any order ---


class Actor:
    """Sends its messages in order; a client continues when its hello was answered."""

    def __init__(self, peer: str, *bodies) -> None:
        self.peer = peer
        self.bodies = deque(bodies)
        self.waiting = False


@settings(max_examples=20 * pace.rounds)
@given(st.lists(st.integers(0, 5), max_size=60))
def test_no_worker_is_lost_and_no_rank_granted_twice_in_any_order(order):
    kit = cluster(3)
    token = "token1"
    kit.driver("w", role="worker", worker_id="g-1", token=token)
    ranks = kit.ranks()
    kit.restart()
    there = [running(spec, "d1", endpoint=UP, pid=7) for spec in specs("g", [0, 1, 2])]
    hellos = [agent_hello(f"n{n}", ip=f"10.0.0.{n + 1}", is_head=n == 0, workers=[there[n]]) for n in range(3)]
    actors = [
        *(Actor(f"a:n{n}", hello) for n, hello in enumerate(hellos)),
        Actor("d1", client_hello("d1", token="old"), handle(kit, 3), GetNodes(3)),
        Actor("w", client_hello("w", role="worker", worker_id="g-1", token="old"), FindGroup("ns", "g")),
        Actor("d2", client_hello("d2"), Launch("ns", "g", "m:C", specs("g", [0], launch="x")), FindGroup("ns", "g")),
    ]
    got: dict[str, list] = {actor.peer: [] for actor in actors}
    changed: list[WorkerChanged] = []
    stops: list[StopWorkers] = []

    def speak(actor: Actor) -> None:
        if not actor.bodies or actor.waiting:
            return
        body = actor.bodies.popleft()
        if isinstance(body, Handles):
            kit.tell(actor.peer, body)
        else:
            actor.waiting = True
            kit.ask(actor.peer, body)
        for peer, answer in [*kit.answers(), *((r.peer.decode(), r) for r in kit.refusals())]:
            got[peer].append(answer)
            next(a for a in actors if a.peer == peer).waiting = False
        changed.extend(kit.sent(WorkerChanged, "d1"))
        stops.extend(kit.sent(StopWorkers))

    for n in order:
        speak(actors[n])
    for _ in range(4):
        for actor in actors:
            speak(actor)
    assert not any(actor.bodies or actor.waiting for actor in actors)
    assert stops == []
    assert kit.ranks() == ranks
    assert kit.group_states() == {"g": "running"}
    kinds = {peer: [type(answer) for answer in answers] for peer, answers in got.items()}
    assert kinds == {
        **{f"a:n{n}": [Welcome] for n in range(3)},
        "d1": [Welcome, Nodes],
        "w": [Welcome, Launched],
        "d2": [Welcome, Refuse, Launched],
    }
    assert got["d2"][1].kind == "name_in_use"
    assert got["d2"][0].token == got["d1"][0].token == "old"
    for answer in (got["w"][1], got["d2"][2]):
        assert [(worker.id, worker.state) for worker in answer.group.workers] == [
            (f"g-{n}", "running") for n in range(3)
        ]
    assert not any(worker.state == "gone" for change in changed for worker in change.workers)


def test_token_of_running_workers_is_not_replaced_by_an_ended_workers():
    kit = cluster(2)
    kit.restart()
    old = replace(specs("older", [0])[0], token="older")
    back(kit, 1)
    ended = replace(running(old, "d1", exit=ExitReport("exited", 0)), spec=old)
    kit.node("n0", ip="10.0.0.1", is_head=True, workers=[ended])
    worker = client_hello("w", role="worker", worker_id="g-1", token="old")
    assert isinstance(kit.ask("w", worker), Welcome)


def test_token_of_running_workers_replaces_an_ended_workers():
    kit = cluster(2)
    kit.restart()
    old = replace(specs("older", [0])[0], token="older")
    ended = replace(running(old, "d1", exit=ExitReport("exited", 0)), spec=old)
    kit.node("n0", ip="10.0.0.1", is_head=True, workers=[ended])
    back(kit, 1)
    worker = client_hello("w", role="worker", worker_id="g-1", token="old")
    assert isinstance(kit.ask("w", worker), Welcome)
