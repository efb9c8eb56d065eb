"""A group that was shut down, or whose launch was withdrawn, does not return; its namesake is left alone."""

from __future__ import annotations

import pytest
from head_kit import HeadKit, agent_hello, running, specs
from head_status import status_of
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
    """Node n0 and d1's group g, whose only worker runs and has a restart policy."""
    kit = HeadKit()
    kit.cluster()
    assert isinstance(kit.ask("d1", Launch("ns", "g", "m:C", lasting([0]))), Launched)
    kit.ready("a:n0", "g-0")
    return kit


def node_returns(kit: HeadKit, *workers) -> None:
    kit.ask("a:n0", agent_hello("n0", ip="10.0.0.1", is_head=True, workers=list(workers)))


def started(kit: HeadKit) -> list[str]:
    return [spec.id for one in kit.sent(StartWorkers) for spec in one.workers]


def state(id: str = "g-0", **more) -> WorkerState:
    return WorkerState(id, 0, 0, "10.0.0.1", "running", 7, UP, **more)


# --- repeated reports of an end ---


def test_repeated_end_report_after_the_shutdown_restarts_no_worker():
    kit = cluster()
    kit.exited("a:n0", "g-0", kind="signalled", exit_code=None, signal=9)
    assert kit.ask("d1", StopGroup("ns", "g", 1.0)) == Done()
    node_returns(kit, running(lasting([0])[0], "d1", exit=KILLED))
    assert kit.group_states() == {}
    kit.wait(2)
    assert started(kit) == []


def test_late_end_of_a_rank_missing_in_the_namesake_restarts_no_worker():
    kit = HeadKit()
    kit.cluster()
    kit.ask("d1", Launch("ns", "g", "m:C", lasting([0, 0], "old")))
    kit.exited("a:n0", "old-1", kind="signalled", exit_code=None, signal=9)
    kit.ask("d1", StopGroup("ns", "g", 1.0))
    kit.exited("a:n0", "old-0", kind="stopped")
    assert isinstance(kit.ask("d1", Launch("ns", "g", "m:C", lasting([0], "new"))), Launched)
    new = running(lasting([0], "new")[0], "d1", pid=5)
    node_returns(kit, new, running(lasting([0, 0], "old")[1], "d1", exit=KILLED))
    (group,) = status_of(kit.head, kit.now).groups
    assert [worker.id for worker in group.workers] == ["new-0"]


def test_restarted_head_frees_the_name_of_a_group_that_was_shut_down():
    kit = cluster()
    kit.restart()
    kit.driver("d1", token="token1")
    kit.tell("d1", Handles([]))
    assert kit.ask("d1", Launch("ns", "g", "m:C", lasting([0], "new"))) is None
    node_returns(kit, running(lasting([0])[0], "d1", exit=KILLED))
    (launched,) = [answer for peer, answer in kit.answers() if peer == "d1"]
    assert [worker.id for worker in launched.group.workers] == ["new-0"]
    kit.wait(2)
    assert "g-0.1" not in started(kit)


@pytest.mark.parametrize("first", ["the agent", "the owner"])
def test_restarted_head_stops_workers_of_a_group_that_was_shut_down(first):
    kit = cluster()
    kit.restart()
    runs = running(lasting([0])[0], "d1", endpoint=UP, pid=7)
    if first == "the agent":
        node_returns(kit, runs)
        kit.driver("d1", token="token1")
        kit.tell("d1", Handles([]))
    else:
        kit.driver("d1", token="token1")
        kit.tell("d1", Handles([]))
        node_returns(kit, runs)
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["g-0"]]


@pytest.mark.parametrize(
    "said",
    [
        Handles([GroupHandle("ns", "g", [state()])]),
        Handles([GroupHandle("ns", "g", [state("g-0.1", restarts=1)])]),
        Handles([], ["g-0"]),
    ],
)
def test_group_that_its_owner_knows_or_awaits_keeps_running(said):
    kit = cluster()
    kit.restart()
    node_returns(kit, running(lasting([0])[0], "d1", endpoint=UP, pid=7))
    kit.driver("d1", token="token1")
    kit.tell("d1", said)
    assert kit.sent(StopWorkers) == []
    kit.tell("d1", Handles([]))  # a late copy of an earlier message
    assert kit.sent(StopWorkers) == []


def test_namesake_of_the_owners_group_is_stopped():
    kit = cluster()
    kit.restart()
    node_returns(kit, running(lasting([0])[0], "d1", endpoint=UP, pid=7))
    kit.driver("d1", token="token1")
    kit.tell("d1", Handles([GroupHandle("ns", "g", [state("other-0")])]))
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["g-0"]]


def test_group_launched_by_a_worker_for_its_owner_keeps_running():
    kit = HeadKit()
    kit.cluster()
    kit.driver("w")
    kit.ask("w", Launch("ns", "g", "m:C", specs("g", [0]), detached=True))
    (order,) = kit.sent(StartWorkers)
    assert (order.owner, order.detached) == ("d1", True)
    kit.restart()
    node_returns(kit, running(specs("g", [0])[0], "d1", endpoint=UP, pid=7, detached=True))
    kit.driver("d1", token="token1")
    kit.tell("d1", Handles([]))
    assert kit.sent(StopWorkers) == []
    assert kit.group_states() == {"g": "running"}


def test_groups_of_other_owners_keep_running():
    kit = cluster()
    kit.restart()
    node_returns(kit, running(lasting([0])[0], "d1", endpoint=UP, pid=7))
    kit.driver("d2", token="token1")
    kit.tell("d2", Handles([]))
    assert kit.sent(StopWorkers) == []


# --- repeated and late stops ---


def test_stop_of_earlier_workers_spares_a_namesake():
    kit = HeadKit()
    kit.cluster()
    kit.driver("d2")
    kit.launch("g", [0], peer="d2", launch="theirs")
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["mine-0", "mine-1"])) == Done()
    assert kit.sent(StopWorkers) == []
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["theirs-0.2"])) is None
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["theirs-0"]]


def test_waiting_launch_is_withdrawn_only_by_its_own_worker_ids():
    kit = HeadKit()
    kit.cluster()
    arm = [Claim("arm:1", "arm 1")]
    kit.ask("d1", Launch("ns", "holds", "m:C", [replace(specs("holds", [0])[0], claims=arm)]))
    kit.ask("d1", Launch("ns", "g", "m:C", [replace(specs("g", [0])[0], claims=arm)], wait_s=60.0))
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["earlier-0"])) == Done()
    assert kit.refusals() == []
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["g-0"])) == Done()
    assert [refused.kind for refused in kit.refusals()] == ["hardware_in_use"]


def test_withdrawal_drops_a_launch_held_by_a_restarted_head():
    """A namesake is complete already, so a stop by name would be answered at once."""
    kit = HeadKit()
    kit.cluster(2)
    kit.driver("d2")
    kit.launch("g", [0], peer="d2")
    kit.restart()
    node_returns(kit, running(specs("g", [0])[0], "d2", endpoint=UP, pid=7))
    kit.driver("d1", token="token1")
    kit.driver("d2", token="token1")
    assert kit.launch("g", [0], launch="late") is None
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["late-0"])) is None
    kit.exited("a:n0", "g-0", kind="stopped")
    kit.node("n1", ip="10.0.0.2")
    assert started(kit) == ["late-0"]
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["late-0"]]
