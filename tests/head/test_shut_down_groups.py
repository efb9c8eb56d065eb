"""A group that was shut down, or whose launch was given up, does not come back, and its namesake is left alone."""

from __future__ import annotations

import pytest
from head_kit import HeadKit, agent_hello, running, specs
from msgspec.structs import replace

from rlinf_actors import RestartPolicy
from rlinf_actors.wire.agent_messages import StartWorkers, StopWorkers
from rlinf_actors.wire.client_messages import Done, Handles, Launch, Launched, StopGroup
from rlinf_actors.wire.values import Claim, Endpoint, ExitReport, GroupHandle, WorkerState

UP = Endpoint("h", "ipc://x")
KILLED = ExitReport("signalled", signal=9)
POLICY = RestartPolicy.on_failure(backoff_s=1)


def lasting(nodes: list[int], launch: str = "g"):
    return [replace(spec, restart=POLICY) for spec in specs("g", nodes, launch=launch)]


def cluster() -> HeadKit:
    """Node n0 and d1's group g, whose only worker runs and is started again when it fails."""
    kit = HeadKit()
    kit.cluster()
    assert isinstance(kit.ask("d1", Launch("ns", "g", "m:C", lasting([0]))), Launched)
    kit.ready("a:n0", "g-0")
    return kit


def back(kit: HeadKit, *workers) -> None:
    kit.ask("a:n0", agent_hello("n0", ip="10.0.0.1", is_head=True, workers=list(workers)))


def started(kit: HeadKit) -> list[str]:
    return [spec.id for one in kit.sent(StartWorkers) for spec in one.workers]


def state(id: str = "g-0", **more) -> WorkerState:
    return WorkerState(id, 0, 0, "10.0.0.1", "running", 7, UP, **more)


# --- the head hears of its end once more ---


def test_end_that_is_reported_again_after_the_shutdown_starts_nothing():
    kit = cluster()
    kit.exited("a:n0", "g-0", kind="signalled", exit_code=None, signal=9)
    assert kit.ask("d1", StopGroup("ns", "g", 1.0)) == Done()
    back(kit, running(lasting([0])[0], "d1", exit=KILLED))
    assert kit.group_states() == {}
    kit.wait(2)
    assert started(kit) == []


def test_late_end_of_a_rank_that_the_namesake_lacks_starts_nothing():
    kit = HeadKit()
    kit.cluster()
    kit.ask("d1", Launch("ns", "g", "m:C", lasting([0, 0], "old")))
    kit.exited("a:n0", "old-1", kind="signalled", exit_code=None, signal=9)
    kit.ask("d1", StopGroup("ns", "g", 1.0))
    kit.exited("a:n0", "old-0", kind="stopped")
    assert isinstance(kit.ask("d1", Launch("ns", "g", "m:C", lasting([0], "new"))), Launched)
    new = running(lasting([0], "new")[0], "d1", pid=5)
    back(kit, new, running(lasting([0, 0], "old")[1], "d1", exit=KILLED))
    (group,) = kit.head.status(kit.now).groups
    assert [worker.id for worker in group.workers] == ["new-0"]


def test_a_restarted_head_ends_what_its_owner_has_shut_down_and_gives_the_name_again():
    kit = cluster()
    kit.restart()
    kit.driver("d1", token="token1")
    kit.tell("d1", Handles([]))
    assert kit.ask("d1", Launch("ns", "g", "m:C", lasting([0], "new"))) is None
    back(kit, running(lasting([0])[0], "d1", exit=KILLED))
    (launched,) = [answer for peer, answer in kit.answers() if peer == "d1"]
    assert [worker.id for worker in launched.group.workers] == ["new-0"]
    kit.wait(2)
    assert "g-0.1" not in started(kit)


@pytest.mark.parametrize("first", ["the agent", "the owner"])
def test_workers_of_a_group_that_its_owner_shut_down_are_stopped(first):
    kit = cluster()
    kit.restart()
    runs = running(lasting([0])[0], "d1", endpoint=UP, pid=7)
    if first == "the agent":
        back(kit, runs)
        kit.driver("d1", token="token1")
        kit.tell("d1", Handles([]))
    else:
        kit.driver("d1", token="token1")
        kit.tell("d1", Handles([]))
        back(kit, runs)
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["g-0"]]


@pytest.mark.parametrize(
    "said",
    [
        Handles([GroupHandle("ns", "g", [state()])]),
        Handles([GroupHandle("ns", "g", [state("g-0.1", restarts=1)])]),
        Handles([], ["g-0"]),
    ],
)
def test_group_that_its_owner_knows_or_waits_for_goes_on(said):
    kit = cluster()
    kit.restart()
    back(kit, running(lasting([0])[0], "d1", endpoint=UP, pid=7))
    kit.driver("d1", token="token1")
    kit.tell("d1", said)
    assert kit.sent(StopWorkers) == []
    kit.tell("d1", Handles([]))  # a late copy of what was said before
    assert kit.sent(StopWorkers) == []


def test_namesake_of_a_known_group_is_stopped():
    kit = cluster()
    kit.restart()
    back(kit, running(lasting([0])[0], "d1", endpoint=UP, pid=7))
    kit.driver("d1", token="token1")
    kit.tell("d1", Handles([GroupHandle("ns", "g", [state("other-0")])]))
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["g-0"]]


def test_a_group_that_another_launched_for_its_owner_goes_on():
    kit = HeadKit()
    kit.cluster()
    kit.driver("w")
    kit.ask("w", Launch("ns", "g", "m:C", specs("g", [0]), detached=True))
    (order,) = kit.sent(StartWorkers)
    assert (order.owner, order.detached) == ("d1", True)
    kit.restart()
    back(kit, running(specs("g", [0])[0], "d1", endpoint=UP, pid=7, detached=True))
    kit.driver("d1", token="token1")
    kit.tell("d1", Handles([]))
    assert kit.sent(StopWorkers) == []
    assert kit.group_states() == {"g": "running"}


def test_groups_of_other_owners_go_on():
    kit = cluster()
    kit.restart()
    back(kit, running(lasting([0])[0], "d1", endpoint=UP, pid=7))
    kit.driver("d2", token="token1")
    kit.tell("d2", Handles([]))
    assert kit.sent(StopWorkers) == []


# --- a stop that is asked for again, or too late ---


def test_a_stop_leaves_a_namesake_of_its_group_alone():
    kit = HeadKit()
    kit.cluster()
    kit.driver("d2")
    kit.launch("g", [0], peer="d2", launch="theirs")
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["mine-0", "mine-1"])) == Done()
    assert kit.sent(StopWorkers) == []
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["theirs-0.2"])) is None
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["theirs-0"]]


def test_a_launch_that_waits_for_a_robot_is_withdrawn_by_its_own_ids_alone():
    kit = HeadKit()
    kit.cluster()
    arm = [Claim("arm:1", "arm 1")]
    kit.ask("d1", Launch("ns", "holds", "m:C", [replace(specs("holds", [0])[0], claims=arm)]))
    kit.ask("d1", Launch("ns", "g", "m:C", [replace(specs("g", [0])[0], claims=arm)], wait_s=60.0))
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["earlier-0"])) == Done()
    assert kit.refusals() == []
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["g-0"])) == Done()
    assert [refused.kind for refused in kit.refusals()] == ["hardware_in_use"]


def test_a_launch_that_a_restarted_head_holds_does_not_outlive_its_withdrawal():
    """A namesake is whole already, so that a stop of the name would be answered at once."""
    kit = HeadKit()
    kit.cluster(2)
    kit.driver("d2")
    kit.launch("g", [0], peer="d2")
    kit.restart()
    back(kit, running(specs("g", [0])[0], "d2", endpoint=UP, pid=7))
    kit.driver("d1", token="token1")
    kit.driver("d2", token="token1")
    assert kit.launch("g", [0], launch="late") is None
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["late-0"])) is None
    kit.exited("a:n0", "g-0", kind="stopped")
    kit.node("n1", ip="10.0.0.2")
    assert started(kit) == ["late-0"]
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["late-0"]]
