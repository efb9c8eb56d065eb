"""Groups that outlive their launcher: channels of workers, and detached groups."""

from __future__ import annotations

import pytest
import restart_kit
from head_kit import HeadKit, agent_hello, running, specs
from head_status import status_of
from msgspec.structs import replace

from rlinf_actors.head.commands import Refuse
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.wire.agent_messages import Goodbye, StartWorkers, StopWorkers
from rlinf_actors.wire.client_messages import (
    Detach,
    Done,
    DrainNode,
    EndGroup,
    FindGroup,
    Handles,
    Launch,
    Launched,
    StopGroup,
    WorkerChanged,
)
from rlinf_actors.wire.values import Claim


def made_by_a_worker(detached):
    kit = HeadKit()
    kit.cluster()
    token = kit.launch("g", [0]).group.token
    kit.driver("w", role="worker", worker_id="g-0", token=token)
    launched = kit.ask("w", Launch("ns", "c", "m:C", specs("c", [0]), detached=detached))
    [started] = kit.sent(StartWorkers, "a:n0")
    assert started.owner == launched.group.owner
    return kit, launched.group.owner


def test_detached_launch_of_a_worker_outlives_it_and_ends_with_the_driver():
    kit, owner = made_by_a_worker(detached=True)
    assert owner == "d1"
    kit.ready("a:n0", "c-0")
    assert [change.group for change in kit.sent(WorkerChanged, "w")] == ["c"]
    kit.exited("a:n0", "g-0")
    assert kit.sent(StopWorkers) == []
    kit.tell("d1", Goodbye())
    assert ["c-0"] in [stop.ids for stop in kit.sent(StopWorkers)]


def test_plain_launch_of_a_worker_ends_with_the_worker():
    kit, owner = made_by_a_worker(detached=False)
    assert owner == "w"
    kit.exited("a:n0", "g-0")
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["c-0"]]


# --- groups that are detached after their construction ---


def launched(kit, group="s", nodes=(0,), peer="d1", **more):
    return kit.ask(peer, Launch("ns", group, "m:C", specs(group, list(nodes)), outlives=True, **more))


def detached(count=1):
    """Group s on every node, launched and detached by its driver."""
    kit = HeadKit()
    kit.cluster(count)
    assert isinstance(launched(kit, nodes=range(count)), Launched)
    for n in range(count):
        kit.ready(f"a:n{n}", f"s-{n}")
    assert kit.ask("d1", Detach("ns", "s", [f"s-{n}" for n in range(count)])) == Done()
    return kit


def state(kit, name="s"):
    return next((group for group in status_of(kit.head, kit.now).groups if group.name == name), None)


def test_detached_group_outlives_its_driver():
    kit = detached()
    assert [(order.owner, order.detached) for order in kit.sent(StartWorkers, "a:n0")] == [("", True)]
    assert (state(kit).owner, state(kit).detached) == ("", True)
    kit.tell("d1", Goodbye())
    assert kit.sent(StopWorkers) == []
    assert kit.group_states() == {"s": "running"}


def test_driver_is_notified_of_its_group_after_detaching_it():
    kit = detached()
    kit.exited("a:n0", "s-0")
    assert [change.group for change in kit.sent(WorkerChanged, "d1")] == ["s"]


def test_a_later_driver_of_the_namespace_finds_and_ends_it():
    kit = detached()
    kit.tell("d1", Goodbye())
    kit.driver("d2")
    assert isinstance(kit.ask("d2", FindGroup("ns", "s")), Launched)
    kit.ask("d2", StopGroup("ns", "s", 1.0, ["s-0"]))
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["s-0"]]
    kit.exited("a:n0", "s-0")
    assert ("d2", Done()) in kit.answers()


def test_group_ends_with_a_driver_that_did_not_detach_it():
    kit = HeadKit()
    kit.cluster()
    launched(kit)
    kit.tell("d1", Goodbye())
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["s-0"]]
    assert "its owner ended" in kit.sent(StopWorkers)[0].reason


def test_group_that_a_worker_detaches_belongs_to_the_driver():
    kit = HeadKit()
    kit.cluster()
    token = kit.launch("g", [0]).group.token
    kit.driver("w", role="worker", worker_id="g-0", token=token)
    launched(kit, peer="w")
    kit.ask("w", Detach("ns", "s", ["s-0"]))
    assert (state(kit).owner, state(kit).detached) == ("d1", False)
    kit.exited("a:n0", "g-0")
    assert kit.sent(StopWorkers) == []
    kit.tell("d1", Goodbye())
    assert ["s-0"] in [stop.ids for stop in kit.sent(StopWorkers)]


def test_group_that_a_worker_without_a_driver_detaches_has_no_owner():
    kit = detached()
    token = kit.ask("d1", FindGroup("ns", "s")).group.token
    kit.tell("d1", Goodbye())
    kit.driver("w", role="worker", worker_id="s-0", token=token)
    launched(kit, "u", peer="w")
    assert kit.ask("w", Detach("ns", "u", ["u-0"])) == Done()
    assert state(kit, "u").detached
    kit.exited("a:n0", "s-0")
    assert kit.group_states() == {"u": "starting"}


def test_repeated_detach_is_accepted():
    kit = detached()
    assert kit.ask("d1", Detach("ns", "s", ["s-0"])) == Done()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Detach("ns", "nothing", ["s-0"]), "has ended and cannot be detached"),
        (Detach("ns", "s", ["namesake-0"]), "has ended and cannot be detached"),
        (Detach("elsewhere", "s", ["s-0"]), "belongs to job 'ns'"),
    ],
)
def test_impossible_detach_is_refused(asked, said):
    kit = HeadKit()
    kit.cluster()
    launched(kit)
    refused = kit.ask("d1", asked)
    assert isinstance(refused, Refuse)
    assert said in refused.text


def test_group_of_another_client_cannot_be_detached():
    kit = HeadKit()
    kit.cluster()
    launched(kit)
    kit.driver("d2")
    refused = kit.ask("d2", Detach("ns", "s", ["s-0"]))
    assert "belongs to another client" in refused.text
    assert state(kit).owner == "d1"


def test_impossible_detached_launches_are_refused():
    kit = HeadKit(embedded=True)
    kit.cluster()
    assert "ends with it" in launched(kit).text
    kit = HeadKit()
    kit.cluster()
    [spec] = specs("s", [0])
    robot, again = [Claim("arm", "Franka 1")], RestartPolicy.on_failure()
    for made, said in ((replace(spec, claims=robot), "robots"), (replace(spec, restart=again), "started again")):
        assert said in kit.ask("d1", Launch("ns", "s", "m:C", [made], outlives=True)).text
    assert kit.group_states() == {}


# --- restarted heads and agentds ---


def returns(kit, node, owner, gave_up, count=1):
    """A node's agent returns to a new head with its worker of s."""
    worker = running(specs("s", list(range(count)))[node], owner, detached=gave_up, endpoint=restart_kit.UP, pid=7)
    return kit.ask(f"a:n{node}", agent_hello(f"n{node}", ip=f"10.0.0.{node + 1}", is_head=node == 0, workers=[worker]))


def test_restarted_head_keeps_a_detached_group_without_its_driver():
    kit = detached()
    kit.restart()
    returns(kit, 0, "", True)
    kit.beats("a:n0", seconds=300)
    assert kit.sent(StopWorkers) == []
    assert (state(kit).state, state(kit).detached) == ("running", True)
    kit.driver("d2")
    assert isinstance(kit.ask("d2", FindGroup("ns", "s")), Launched)


def test_agent_that_missed_a_detach_gets_it_again():
    kit = detached()
    returns(kit, 0, "d1", False)
    assert [(order.owner, order.detached) for order in kit.sent(StartWorkers, "a:n0")] == [("", True)]


@pytest.mark.parametrize("first", [0, 1])
def test_restarted_head_learns_of_a_detach_from_one_node(first):
    kit = detached(2)
    kit.restart()
    for node in (first, 1 - first):
        returns(kit, node, "" if node else "d1", bool(node), 2)
        assert kit.sent(StopWorkers) == []
    assert ("", True) in [(order.owner, order.detached) for order in kit.sent(StartWorkers, "a:n0")]
    kit.beats("a:n0", "a:n1", seconds=300)
    assert kit.group_states() == {"s": "running"}


def test_returning_driver_does_not_end_its_detached_group():
    kit = detached()
    kit.restart()
    returns(kit, 0, "", True)
    restart_kit.returns(kit)
    kit.tell("d1", Handles([]))
    kit.tell("d1", Goodbye())
    assert kit.group_states() == {"s": "running"}


def test_drained_node_keeps_a_detached_group():
    kit = detached()
    kit.ask("somebody", DrainNode("n0", "me"))
    assert kit.sent(StopWorkers) == []
    assert kit.group_states() == {"s": "running"}


# --- get_if_exists ---


def wants(kit, peer="d1", cls="m:C", launch="t", nodes=(0, 0)):
    return kit.ask(peer, Launch("ns", "s", cls, specs("s", list(nodes), launch=launch), get_if_exists=True))


def test_second_launch_with_get_if_exists_gets_the_existing_group():
    kit = HeadKit()
    kit.cluster()
    kit.driver("d2")
    first, second = wants(kit, launch="one"), wants(kit, "d2", launch="two")
    assert [worker.id for worker in first.group.workers] == [worker.id for worker in second.group.workers]
    kit.ready("a:n0", "one-0")
    assert {change.group for peer in ("d1", "d2") for change in kit.sent(WorkerChanged, peer)} == {"s"}


def test_get_if_exists_refuses_a_group_of_another_class():
    kit = HeadKit()
    kit.cluster()
    wants(kit)
    refused = wants(kit, cls="m:D", launch="two")
    assert (refused.kind, "is of class m:C, not of m:D" in refused.text) == ("name_in_use", True)
    assert isinstance(wants(kit, cls="__main__:C", launch="two"), Launched)


def test_get_if_exists_refuses_a_group_that_is_being_stopped():
    kit = HeadKit()
    kit.cluster()
    wants(kit, launch="one")
    kit.ask("d1", StopGroup("ns", "s", 1.0, []))
    assert wants(kit, launch="two").kind == "name_in_use"
    for rank in range(2):
        kit.exited("a:n0", f"one-{rank}")
    assert [worker.id for worker in wants(kit, launch="two").group.workers] == ["two-0", "two-1"]


# --- `rlinf-actors groups stop` ---


def test_detached_group_is_ended_by_name():
    kit = detached()
    kit.tell("d1", Goodbye())
    assert kit.ask("operator", EndGroup("ns", "s", 1.0, "me", "old")) is None
    [stop] = kit.sent(StopWorkers)
    assert (stop.ids, stop.grace_s, stop.reason) == (["s-0"], 1.0, "me ended it: old")
    kit.exited("a:n0", "s-0", kind="stopped")
    assert ("operator", Done()) in kit.answers()
    assert kit.ask("operator", EndGroup("ns", "s", 1.0, "me")).kind == "not_found"
