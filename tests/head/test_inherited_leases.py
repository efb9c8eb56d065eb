"""Groups that a robot's worker has launched inherit its lease: who holds the robot, and what stops them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from head_kit import HeadKit, specs
from head_status import status_of

from rlinf_actors.head.commands import Refuse
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.wire.agent_messages import LeaseEnded, StartWorkers, StopWorkers
from rlinf_actors.wire.client_messages import EStop, EStopped, Launch, Launched
from rlinf_actors.wire.values import Claim

ARM = Claim("Franka:10.0.1.1", "Franka 10.0.1.1")
INHERITED = msgspec.structs.replace(ARM, by="env-0")


class Lab(HeadKit):
    """On n0 group env has an arm; its worker w1 launches groups on n1."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.cluster(2)
        self.driver("d2", namespace="other", pid=200, host="host-n1")
        assert isinstance(self.claim("env", ARM, "d1", 0, **fields), Launched)
        self.ready("a:n0", "env-0")
        self.driver("w1", role="worker", worker_id="env-0", host="host-n0", token="token1")

    def claim(self, group: str, claim: Claim, peer: str = "w1", node: int = 1, **fields: Any) -> object:
        namespace = "other" if peer == "d2" else "ns"
        (spec,) = specs(group, [node], namespace)
        return self.ask(
            peer, Launch(namespace, group, "m:C", [msgspec.structs.replace(spec, claims=(claim,), **fields)])
        )

    def go_on(self, *peers: str) -> None:
        """Let these peers beat for some leases."""
        for _ in range(20):
            for peer in peers:
                self.beat(peer)
            self.wait(0.25)

    def stopped(self) -> list[tuple[str, str]]:
        return [(id, stop.reason) for stop in self.sent(StopWorkers) for id in stop.ids]


@pytest.fixture
def lab() -> Lab:
    lab = Lab()
    assert isinstance(lab.claim("controller", INHERITED), Launched)
    lab.ready("a:n1", "controller-0")
    return lab


def test_group_of_a_robots_worker_holds_the_robot_with_it_and_after_it(lab):
    (lease,) = status_of(lab.head, lab.now).leases
    assert lease.workers == ["env:0", "controller:0"]
    lab.exited("a:n0", "env-0")
    answer = lab.claim("h", ARM, "d2")
    assert isinstance(answer, Refuse)
    assert "held by group 'controller'" in answer.text
    lab.exited("a:n1", "controller-0")
    assert isinstance(lab.claim("h", ARM, "d2"), Launched)


def test_group_that_claims_to_inherit_from_another_worker_is_refused(lab):
    assert isinstance(lab.claim("h", msgspec.structs.replace(ARM, by="x-0")), Refuse)


def test_emergency_stop_stops_the_group_too(lab):
    stopped = lab.ask("d2", EStop("a hand", "ann"))
    assert isinstance(stopped, EStopped)
    assert {id for id, _ in lab.stopped()} == {"env-0", "controller-0"}


def test_end_of_the_launchers_lease_stops_the_group_at_once(lab):
    lab.driver("w2", role="worker", worker_id="controller-0", host="host-n1", token="token1")
    assert isinstance(lab.claim("gripper", INHERITED, "w2"), Launched)
    lab.sent(StopWorkers)
    lab.tell("a:n0", LeaseEnded("env-0", "it was sent SIGTERM"))
    assert lab.stopped() == [("controller-0", "env:0 launched it: it was sent SIGTERM")]
    lab.tell("a:n1", LeaseEnded("controller-0", "env:0 launched it"))
    assert [id for id, _ in lab.stopped()] == ["gripper-0"]


def test_agentd_of_a_silent_launcher_vouches_for_it_and_no_longer_than_a_lease(lab):
    lab.go_on("d1", "a:n0", "a:n1")
    assert lab.stopped() == []
    since = lab.now
    while not (stopped := [one for one in lab.stopped() if one[0] == "controller-0"]):
        lab.beat("d1")
        lab.beat("a:n1")
        lab.wait(0.1)
    assert stopped == [("controller-0", "its owner, or the agentd of that robot worker, was silent for 1.6 s")]
    assert lab.now - since <= 1.7


def test_rank_is_started_again_only_when_what_it_launched_is_gone():
    lab = Lab(restart=RestartPolicy.on_failure(after_lease_lost=True))
    assert isinstance(lab.claim("controller", INHERITED), Launched)
    lab.sent(StartWorkers)
    lab.exited("a:n0", "env-0", kind="signalled", exit_code=None, signal=9)
    lab.go_on("d1", "w1", "a:n0", "a:n1")
    assert not lab.sent(StartWorkers)
    lab.exited("a:n1", "controller-0")
    (started,) = lab.sent(StartWorkers)
    assert [spec.rank for spec in started.workers] == [0]
