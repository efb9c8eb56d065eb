"""Exclusive hardware: owners of robots, their release, and launches that wait for a robot."""

from __future__ import annotations

import msgspec
import pytest
from head_kit import HeadKit, agent_hello, running, specs
from head_status import status_of
from msgspec.structs import replace

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.head.commands import Refuse
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.agent_messages import Beat, Goodbye, StartWorkers, StopWorkers
from rlinf_actors.wire.client_messages import EStop, Launch, Launched, StopCluster, StopGroup, Warn, WorkerChanged
from rlinf_actors.wire.control_codec import Notice, Request
from rlinf_actors.wire.values import Claim, Endpoint, ExitReport, LeaseState, WorkerSpec

ARM, OTHER = Claim("Franka:10.0.1.1", "Franka 10.0.1.1"), Claim("Franka:10.0.1.2", "Franka 10.0.1.2")


class Lab(HeadKit):
    """A cluster with drivers d1 and d2 of two namespaces."""

    def __init__(self, nodes: int = 2, **timing: float) -> None:
        super().__init__(**timing)
        self.cluster(nodes)
        self.driver("d2", namespace="other", pid=200, host="host-n1")

    def claim(self, group="g", claims=((ARM,),), nodes=None, peer="d1", launch="", wait_s=0.0):
        """Launch a group whose worker of rank k holds claims[k]."""
        namespace = "ns" if peer == "d1" else "other"
        made = specs(group, nodes or [0] * len(claims), namespace, launch)
        workers = [msgspec.structs.replace(s, claims=tuple(c)) for s, c in zip(made, claims, strict=True)]
        return self.ask(peer, Launch(namespace, group, "m:C", workers, wait_s=wait_s))

    def leases(self) -> list[LeaseState]:
        return status_of(self.head, self.now).leases


def refused(answer) -> str:
    assert isinstance(answer, Refuse), answer
    assert answer.kind == "hardware_in_use"
    return answer.text


def arm_spec(group: str = "g", node: int = 0, namespace: str = "ns") -> WorkerSpec:
    return msgspec.structs.replace(specs(group, [node], namespace)[0], claims=(ARM,))


# --- refusals ---


def test_launch_with_one_taken_robot_is_refused_and_names_the_owner():
    lab = Lab()
    lab.claim(peer="d2", group="arms")
    lab.wait(0.5)
    lab.now += 12
    text = refused(lab.claim(claims=((OTHER,), (ARM,))))
    assert text.startswith(
        "Franka 10.0.1.1 is held by group 'arms' of job 'other', owned by a driver (pid 200 on n1); "
    )
    assert "its worker arms:0 on node n0 (10.0.0.1) has had it for 12 s" in text
    assert "wait_for_hardware" in text
    assert not lab.sent(StartWorkers)
    assert [lease.key for lease in lab.leases()] == [ARM.key]
    assert isinstance(lab.claim(claims=((OTHER,),)), Launched)


def test_refusal_says_what_the_holder_calls_the_robot():
    lab = Lab()
    lab.claim(peer="d2", group="arms")
    named = msgspec.structs.replace(ARM, title="Franka left-arm")
    text = refused(lab.claim(claims=((named,),)))
    assert text.startswith(
        "Franka left-arm is held by group 'arms' of job 'other' as Franka 10.0.1.1, owned by a driver"
    )


def test_refusal_describes_remote_worker_and_ended_owners():
    lab = Lab()
    lab.claim()
    assert "owned by a driver (pid 100 on a machine without an agentd);" in refused(lab.claim("h", peer="d2"))
    lab.driver("w1", role="worker", worker_id="g-0", host="host-n0", token="token1")
    made = msgspec.structs.replace(specs("inner", [1])[0], claims=(OTHER,))
    assert isinstance(lab.ask("w1", Launch("ns", "inner", "m:C", [made])), Launched)
    assert "owned by worker g:0 (pid 100 on n0)" in refused(lab.claim("h", ((OTHER,),), peer="d2"))
    lab.tell("d1", Goodbye("done"))
    assert "whose owner has ended (done)" in refused(lab.claim("h", peer="d2"))


def test_workers_of_one_group_share_a_robot_and_the_last_one_frees_it():
    lab = Lab()
    assert isinstance(lab.claim(claims=((ARM,), (ARM, OTHER))), Launched)
    assert [lease.workers for lease in lab.leases()] == [["g:0", "g:1"], ["g:1"]]
    lab.exited("a:n0", "g-0")
    refused(lab.claim("h", peer="d2"))
    lab.exited("a:n0", "g-1")
    assert isinstance(lab.claim("h", peer="d2"), Launched)


def test_groups_of_one_namespace_share_a_robot_if_both_allow_it():
    lab = Lab()
    shared = msgspec.structs.replace(ARM, shared=True)
    lab.claim("a", ((shared,),))
    assert isinstance(lab.claim("b", ((shared,),)), Launched)
    assert "held by group 'a'" in refused(lab.claim("c", ((ARM,),)))
    assert "held by group 'a'" in refused(lab.claim("d", ((shared,),), peer="d2"))
    lab.exited("a:n0", "a-0")
    assert [(lease.group, lease.workers) for lease in lab.leases()] == [("b", ["b:0"])]
    assert "held by group 'b'" in refused(lab.claim("e", ((shared,),), peer="d2"))


def test_end_of_a_robots_worker_frees_it_while_the_group_runs():
    lab = Lab()
    lab.claim(claims=((ARM,), (OTHER,)))
    lab.exited("a:n0", "g-0")
    assert isinstance(lab.claim("h", peer="d2"), Launched)
    assert "group 'g'" in refused(lab.claim("i", ((OTHER,),), peer="d2"))


def test_robot_is_free_when_the_shutdown_is_answered():
    lab = Lab()
    lab.claim()
    lab.ask("d1", StopGroup("ns", "g", 1.0))
    refused(lab.claim("h", launch="h"))
    lab.exited("a:n0", "g-0")
    assert [peer for peer, _ in lab.answers()] == ["d1"]
    assert isinstance(lab.claim("g", launch="again"), Launched)


def test_robot_of_a_killed_owner_is_free_after_its_workers_end():
    lab = Lab()
    lab.claim(group="mine", claims=((OTHER,),), peer="d2")
    lab.killed("d2", "a:n1")
    (stop,) = lab.sent(StopWorkers)
    assert stop.ids == ["mine-0"]
    refused(lab.claim("h", ((OTHER,),)))
    lab.exited("a:n0", "mine-0")
    assert isinstance(lab.claim("h", ((OTHER,),)), Launched)


# --- lost nodes ---


def lose_node(lab: Lab, node: str) -> None:
    """Let one node be silent for a lease; the others beat."""
    lab.now += lab.timing.lease_s - 0.5
    for n in range(2):
        if f"n{n}" != node:
            lab.tell(f"a:n{n}", Beat("x"))
    for driver in ("d1", "d2"):
        lab.tell(driver, Beat("x"))
    lab.wait(0.5)
    assert lab.node_states()[node] == "lost"


def keep_alive(lab: Lab, seconds: float) -> None:
    """Let time pass in which all peers but n1 beat."""
    end = lab.now + seconds
    while lab.now < end:
        lab.wait(min(1.0, end - lab.now))
        for peer in ("a:n0", "d1", "d2"):
            lab.tell(peer, Beat("x"))


def test_a_lost_worker_shares_its_robot_with_no_group():
    lab = Lab(rank_hold_s=60.0)
    shared = msgspec.structs.replace(ARM, shared=True)
    lab.claim("a", ((shared,),), nodes=[1])
    lose_node(lab, "n1")
    assert [lease.state for lease in lab.leases()] == ["lost"]
    refused(lab.claim("b", ((shared,),)))


def test_robot_of_a_lost_node_is_held_until_its_worker_must_have_ended():
    lab = Lab(rank_hold_s=60.0)
    lab.claim(nodes=[1])
    lose_node(lab, "n1")
    assert lab.group_states() == {}
    keep_alive(lab, 5)
    text = refused(lab.claim("h", peer="d2"))
    assert (
        "was lost 13 s ago and the worker may still be moving it" in text
    )  # a node with a robot is lost after 2 s of silence
    assert "for 47 s" in text
    (lease,) = lab.leases()
    assert (lease.state, lease.nodes, round(lease.free_in_s or 0)) == ("lost", ["n1 (10.0.0.2)"], 47)
    keep_alive(lab, 46)
    refused(lab.claim("h", peer="d2"))
    keep_alive(lab, 1)
    assert lab.leases() == []
    assert isinstance(lab.claim("h", peer="d2"), Launched)


def test_node_that_returns_without_the_worker_frees_its_robot():
    lab = Lab()
    lab.claim(nodes=[1])
    lose_node(lab, "n1")
    refused(lab.claim("h", peer="d2"))
    lab.ask("a:n1b", agent_hello("n1", "second", ip="10.0.0.2"))
    refused(lab.claim("h", peer="d2", nodes=[1]))  # the earlier agent's template may still be stopping the robot
    keep_alive(lab, 4)
    assert isinstance(lab.claim("h", peer="d2", nodes=[1]), Launched)


def test_goodbye_of_a_node_frees_its_robots():
    lab = Lab()
    lab.claim(nodes=[1])
    lab.tell("a:n1", Goodbye("stopped"))
    assert isinstance(lab.claim("h", peer="d2"), Launched)


def test_robot_shared_with_a_lost_node_stays_with_the_living_worker():
    lab = Lab(rank_hold_s=20.0)
    lab.claim(claims=((ARM,), (ARM,)), nodes=[0, 1])
    lose_node(lab, "n1")
    assert [lease.state for lease in lab.leases()] == ["held"]
    keep_alive(lab, 25)
    assert [lease.workers for lease in lab.leases()] == [["g:0"]]


# --- a head that was restarted ---


def test_a_restarted_head_learns_of_robots_from_the_agents():
    kit = HeadKit()
    spec = arm_spec()
    kit.node("n0", workers=[running(spec, "d1", pid=5, endpoint=Endpoint("h", "ipc://x"))])
    kit.driver("d2", namespace="other")
    kit.nodes(1, peer="d2")
    made = msgspec.structs.replace(specs("h", [0], "other")[0], claims=(ARM,))
    text = refused(kit.ask("d2", Launch("other", "h", "m:C", [made])))
    assert "group 'g' of job 'ns', whose owner this head has not heard of since it started" in text
    kit.driver("d1")
    assert "owned by a driver" in refused(kit.ask("d2", Launch("other", "h", "m:C", [made])))


def test_second_of_two_groups_that_report_one_robot_is_stopped():
    kit = HeadKit()
    up = {"pid": 5, "endpoint": Endpoint("h", "ipc://x")}
    kit.node("n0", workers=[running(arm_spec("g"), "d1", **up)])
    second = running(arm_spec("h", 1, "other"), "d2", **up)
    kit.node("n1", workers=[second, running(specs("h", [1, 1], "other")[1], "d2", **up)])
    assert {id for stop in kit.sent(StopWorkers, "a:n1") for id in stop.ids} == {"h-0", "h-1"}
    assert kit.sent(StopWorkers, "a:n0") == []
    (line,) = [line for line in kit.records() if "Franka" in line]
    assert line == "Franka 10.0.1.1 is held by two groups, ('ns', 'g') and ('other', 'h'): the second is stopped"
    assert kit.group_states() == {"g": "running", "h": "stopping"}
    kit.exited("a:n0", "g-0")
    (lease,) = status_of(kit.head, kit.now).leases
    assert (lease.group, lease.workers) == ("h", ["h:0"])
    kit.exited("a:n1", "h-0")
    assert status_of(kit.head, kit.now).leases == []


def test_worker_that_ended_during_the_heads_absence_holds_no_robot():
    kit = HeadKit()
    kit.node("n0", workers=[running(arm_spec(), "d1", pid=5, exit=ExitReport("exited", 0))])
    assert status_of(kit.head, kit.now).leases == []


# --- waiting ---


def test_waiting_launches_start_in_order_when_the_robot_is_free():
    lab = Lab()
    lab.claim()
    assert lab.claim("h", peer="d2", wait_s=60) is None
    (warning,) = lab.sent(Warn, "d2")
    assert warning.text.startswith(
        "group 'h' waits for its hardware, 60 s at most: Franka 10.0.1.1 is held by group 'g'"
    )
    assert lab.claim("i", peer="d2", wait_s=60) is None
    assert lab.claim("j", ((OTHER,),), peer="d2", wait_s=60) is not None
    lab.exited("a:n0", "g-0")
    ((peer, launched),) = lab.answers()
    assert (peer, launched.group.name) == ("d2", "h")
    assert [spec.id for start in lab.sent(StartWorkers) for spec in start.workers] == ["h-0"]
    lab.exited("a:n0", "h-0")
    assert [launched.group.name for _, launched in lab.answers()] == ["i"]


def test_end_of_a_wait_does_not_try_the_launch_again(monkeypatch):
    lab = Lab()
    lab.claim("g")
    for n in range(50):
        assert lab.claim(f"h{n}", peer="d2", wait_s=3) is None
    tries = []
    monkeypatch.setattr(lab.head.groups.claims, "check", lambda *claims: tries.append(claims))
    lab.out = lab.wait(3)
    assert [refuse.kind for refuse in lab.refusals()] == ["hardware_in_use"] * 50
    assert not tries


def test_waiting_launch_is_refused_after_its_wait_s():
    lab = Lab()
    lab.claim()
    assert lab.claim("h", peer="d2", wait_s=3) is None
    keep = lab.now
    lab.wait(2.9)
    assert lab.refusals() == []
    lab.out = lab.wait(0.1)
    assert [refuse.kind for refuse in lab.refusals()] == ["hardware_in_use"]
    assert lab.now == keep + 3
    lab.exited("a:n0", "g-0")
    assert lab.answers() == []


def test_impossible_launch_is_refused_at_once_or_when_its_turn_comes():
    lab = Lab()
    lab.claim()
    answer = lab.claim("h", peer="d2", nodes=[7], wait_s=3)
    assert isinstance(answer, Refuse)
    assert answer.kind == "node_lost"
    assert lab.claim("h", peer="d2", wait_s=60) is None
    lab.claim("h", ((OTHER,),), peer="d2", launch="taken")
    lab.exited("a:n0", "g-0")
    assert [refuse.kind for refuse in lab.refusals()] == ["name_in_use"]


@pytest.mark.parametrize("how", ["stop", "gone"])
def test_launch_whose_client_gave_up_never_starts(how):
    lab = Lab()
    lab.claim()
    assert lab.claim("h", peer="d2", wait_s=60) is None
    if how == "stop":
        lab.ask("d2", StopGroup("other", "h", 1.0))
        (refusal,) = lab.refusals()
        assert "was shut down while it waited" in refusal.text
    else:
        lab.tell("d2", Goodbye())
    lab.exited("a:n0", "g-0")
    assert lab.sent(StartWorkers) == []
    assert lab.leases() == []
    assert lab.sent(WorkerChanged, "d1") != []


def test_end_of_the_cluster_refuses_waiting_launches():
    kit = HeadKit(embedded=True)
    kit.cluster()
    for group in ("g", "h"):
        made = msgspec.structs.replace(specs(group, [0])[0], claims=(ARM,))
        kit.ask("d1", Launch("ns", group, "m:C", [made], wait_s=9.0))
    kit.ask("d1", StopCluster())
    assert [refuse.text for refuse in kit.refusals()] == ["the cluster is being stopped"]
    kit.exited("a:n0", "g-0")
    assert kit.ended()


def test_status_and_stops_can_be_read_with_the_longest_names():
    """One job whose robot had a key of 300 characters made every status unreadable, also for others."""
    kit = HeadKit()
    kit.node("n0", ip="1" * 64, hostname="n" * 128)
    kit.driver()
    kit.nodes(1)
    kit.wait(0.5)
    (spec,) = specs("g", [0])
    robot = Claim("k" * 1024, "t" * 1024)
    launch = control_codec.encode(Request(1, Launch("ns", "g", "m:C", [replace(spec, claims=(robot,))])))
    assert isinstance(kit.ask("d1", control_codec.decode(launch).body), Launched)
    for body in (status_of(kit.head, kit.now), kit.ask("tool", EStop("me"))):
        assert control_codec.decode(control_codec.encode(Notice(body))).body == body
    longer = Launch("ns", "g", "m:C", [replace(spec, claims=(Claim("k" * 1025, "t"),))])
    with pytest.raises(RemoteWireError):
        control_codec.decode(control_codec.encode(Request(1, longer)))
