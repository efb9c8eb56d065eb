"""Between two slices of the head's work anything may change: groups, nodes, clients and ranks are looked up again."""

from __future__ import annotations

import pytest
from head_kit import agent_hello, running, specs
from msgspec.structs import replace
from restart_kit import UP
from test_slices import Turns, cluster, launch

from rlinf_actors.head.commands import Answer, Refuse
from rlinf_actors.head.group_slices import states_of
from rlinf_actors.wire.agent_messages import Goodbye, WorkerExited
from rlinf_actors.wire.client_messages import (
    Done,
    EndGroup,
    GetNodes,
    Handles,
    Launch,
    Launched,
    Nodes,
    StopGroup,
)
from rlinf_actors.wire.resize_messages import AddRanks, ResizeGroup
from rlinf_actors.wire.values import ExitReport, GroupHandle, RestartPolicy

DIED = ExitReport("signalled", signal=9)
RESTARTED = RestartPolicy(max_restarts=3, backoff_s=60.0)


def exits(kit: Turns, *ids: str, node: str = "n0") -> list:
    return [one for id in ids for one in kit.begin(kit.telling(f"a:{node}", WorkerExited(id, DIED)))]


def answered(commands: list, asked) -> list:
    return [one for one in commands if isinstance(one, (Answer, Refuse)) and one.id == asked.id]


def test_the_states_of_a_group_have_the_ranks_that_were_added_meanwhile():
    kit = cluster(1, 1500)
    group = kit.head.groups.get("ns", "g")
    work, found = states_of(group), None
    next(work)
    more = replace(specs("g", [0] * 1501)[-1], id="g-1500a", resizes=-1)
    assert isinstance(kit.ask("d1", AddRanks("ns", "g", [more])), Launched)
    assert kit.ask("d1", ResizeGroup("ns", "g", "g", 1501)) == Done()
    while found is None:
        try:
            next(work)
        except StopIteration as end:
            found = end.value
    assert [state.rank for state in found] == list(range(1501))


def test_a_worker_that_a_node_reports_while_its_group_is_dropped_keeps_the_group():
    kit = cluster(1, 1500)
    exits(kit, *(f"g-{rank}" for rank in range(1500)))
    stop = kit.asking("d1", StopGroup("ns", "g", 0.0))
    kit.begin(stop)
    assert kit.head.unfinished()
    spec = replace(specs("g", [0] * 1500)[7], id="g-7r1")
    kit.begin(kit.asking("a:n0", agent_hello("n0", rank=0, workers=[running(spec, "d1", endpoint=UP, pid=7)])))
    done = kit.rest()
    assert not answered(done, stop) or kit.head.groups.namespace_of("g-7r1") is None
    kit.begin(kit.telling("a:n0", Goodbye("maintenance")))
    kit.rest()
    assert kit.head.groups.get("ns", "g") is None
    assert not kit.head.groups.is_used("n0")


def test_an_agentd_that_reports_ends_before_it_was_told_to_start_ends_no_head():
    kit = cluster(2)
    asked = launch(2, 1000)
    asked = replace(asked, workers=[replace(spec, restart=RESTARTED) for spec in asked.workers])
    kit.begin(kit.asking("d1", asked))
    while kit.head.groups.get("ns", "new") is None:
        kit.turn()
    exits(kit, "new-0", "new-2")
    kit.begin(kit.telling("a:n1", Goodbye("maintenance")))  # so the launch is given up
    kit.rest()
    assert kit.head.groups.get("ns", "new") is None


def test_a_group_may_end_while_its_new_size_is_told():
    kit = cluster(1, 250)
    kit.begin(kit.asking("d1", ResizeGroup("ns", "g", "g", 249, stop=False)))
    assert kit.head.unfinished()
    exits(kit, *(f"g-{rank}" for rank in range(250)))
    kit.rest()
    assert kit.head.groups.get("ns", "g") is None


def test_two_drivers_that_get_nodes_at_once_get_the_same_ranks():
    kit = Turns()
    for n in range(1, 251):
        kit.node(f"n{n}", ip=f"10.0.0.{n}")
    kit.driver("d1")
    kit.driver("d2", namespace="two")
    asked = [kit.asking("d1", GetNodes()), kit.asking("d2", GetNodes())]
    done = kit.begin(asked[0])
    kit.begin(kit.asking("a:n0", agent_hello("n0", ip="10.0.0.0")))  # sorted before the others
    done += kit.begin(asked[1]) + kit.rest()
    answers = [answered(done, one)[0].body for one in asked]
    assert [type(one) for one in answers] == [Nodes, Nodes]
    ranks = {(node.report.node_id, node.rank) for one in answers for node in one.nodes}
    assert sorted(rank for _, rank in ranks) == list(range(251))


def test_a_lost_node_watches_no_client():
    kit = Turns()
    for n in range(150):
        kit.driver(f"d{n}", host="here")
    kit.begin(kit.asking("a:n0", agent_hello("n0", host="here")))
    assert kit.head.unfinished()
    kit.head.nodes.revoked(kit.head.nodes.get("n0"), "its key has ended")
    kit.rest()
    assert not [client for client in kit.head.clients.alive() if client.watchers]


def test_a_lost_node_watches_no_client_of_an_earlier_head():
    kit = cluster(2)
    kit.restart()
    spec = specs("g", [1])[0]
    kit.begin(kit.asking("a:n1", agent_hello("n1", rank=1, workers=[running(spec, "x149", endpoint=UP, pid=7)])))
    kit.begin(kit.asking("a:n0", agent_hello("n0", rank=0, watched=[f"x{n}" for n in range(150)])))
    assert kit.head.unfinished()
    kit.head.nodes.revoked(kit.head.nodes.get("n0"), "its key has ended")
    kit.rest()
    assert kit.head.clients.expected("x149")
    kit.wait(kit.timing.patience_s + 1)
    assert not kit.head.clients.expected("x149")


def test_a_group_that_one_of_its_workers_owns_is_stopped_once():
    """An agentd may say so. The worker ends before it was started again, and with it its session and its group."""
    kit = cluster(1)
    there = [replace(spec, restart=RESTARTED) for spec in specs("g", [0, 0])]
    report = [running(spec, "w", endpoint=UP, pid=7) for spec in there]
    kit.ask("a:n0", agent_hello("n0", rank=0, workers=report))
    exits(kit, "g-0", "g-1")
    kit.driver("w", role="worker", worker_id="g-0.1", token=kit.head.jobs.token("ns"))
    assert kit.head.clients.get("w") is not None
    assert kit.ask("tool", EndGroup("ns", "g", 0.0, "me")) == Done()
    assert kit.head.groups.get("ns", "g") is None


@pytest.fixture
def restarted():
    """A head that was restarted and waits for no node any more. It knows one of 1,500 workers of a group."""
    kit = cluster(1)
    kit.restart()
    spec = specs("g", [0] * 1500)[0]
    kit.ask("a:n0", agent_hello("n0", rank=0, workers=[running(spec, "d1", endpoint=UP, pid=7)]))
    kit.driver("d1", token="old")
    assert kit.head.early.over
    return kit


def test_a_handle_of_a_group_that_ends_meanwhile_does_not_bring_it_back(restarted):
    kit, all_specs = restarted, specs("g", [0] * 1500)
    states = [worker.state() for worker in cluster(1, 1500).head.groups.get("ns", "g").workers.values()]
    kit.begin(kit.telling("d1", Handles([GroupHandle("ns", "g", states)])))
    assert kit.head.unfinished()
    exits(kit, all_specs[0].id)
    kit.driver("d2", token="old")
    fresh = kit.asking("d2", Launch("ns", "g", "m:C", specs("g", [0], launch="h")))
    done = kit.begin(fresh) + kit.rest()
    assert isinstance(answered(done + kit.out, fresh)[0], Answer)
    assert set(kit.head.groups.get("ns", "g").workers) == {"h-0"}


def test_a_launch_of_a_group_that_ends_meanwhile_does_not_bring_it_back(restarted):
    kit, all_specs = restarted, specs("g", [0] * 1500)
    again = kit.asking("d1", Launch("ns", "g", "m:C", all_specs))
    kit.begin(again)
    assert kit.head.unfinished()
    exits(kit, all_specs[0].id)
    assert [type(one) for one in answered(kit.rest(), again)] == [Refuse]
    assert kit.head.groups.get("ns", "g") is None
    assert not kit.head.groups.is_used("n0")
