"""The head refuses launches that a node, or the driver's own key, does not admit."""

from __future__ import annotations

from typing import Any

import pytest
from head_kit import agent_hello, client_hello, specs
from keys_kit import KeysKit, key
from msgspec.structs import replace

from rlinf_actors.head.commands import LogEvent, Notify, Refuse
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.wire.agent_messages import LookForHardware, StartWorkers, WorkerExited, WorkerReady
from rlinf_actors.wire.client_messages import (
    EnumerateHardware,
    GetNodes,
    GetStatus,
    Launch,
    Launched,
    Nodes,
    Status,
)
from rlinf_actors.wire.key_messages import AddKey, KeyLimits, Keys
from rlinf_actors.wire.launch_rules import LaunchRules
from rlinf_actors.wire.node_questions import AskNode
from rlinf_actors.wire.resize_messages import AddRanks
from rlinf_actors.wire.trace_values import TraceQuestion
from rlinf_actors.wire.values import Claim, Endpoint, ExitReport, HardwareQuestion


class Kit(KeysKit):
    """Nodes open (rank 0) and lab (rank 1, with rules); drivers a (in group robots), b, and c (limited to "o*")."""

    def __init__(self, rules: LaunchRules, **labels: str) -> None:
        super().__init__()
        self.give("a:open", "O")
        self.give("a:lab", "L")
        self.driver("a", "A", groups=("robots",))
        self.driver("b", "B")
        self.ask("a:open", agent_hello("open", rank=0))
        self.rules(rules, **labels)
        for name in "ab":
            self.join(name)

    def driver(self, name: str, letter: str, **limits: Any) -> Keys | Refuse:
        answer = self.ask("admin", AddKey(key(letter), "driver", name, "me", None, KeyLimits(**limits)))
        self.keyed[name] = key(letter)
        return answer  # type: ignore[return-value]

    def rules(self, rules: LaunchRules, **labels: str) -> None:
        """The agentd of node lab says hello with these rules, as it does after SIGHUP."""
        self.ask("a:lab", agent_hello("lab", rank=1, admit=rules, labels=labels))

    def join(self, name: str) -> None:
        self.ask(name, client_hello(f"{name}-1", namespace=f"job-{name}"))
        self.ask(name, GetNodes(2))

    def launch(self, peer: str, nodes: list[int], group: str = "g", claims: Any = (), **more: Any) -> Any:
        namespace = f"job-{peer[0]}"
        workers = [
            replace(one, claims=claims, **more) for one in specs(group, nodes, namespace, launch=f"{peer}{group}")
        ]
        return self.ask(peer, Launch(namespace, group, "m:C", workers))

    def orders(self) -> list[StartWorkers]:
        return [one.body for one in self.out if isinstance(one, Notify) and isinstance(one.body, StartWorkers)]

    def refusals(self) -> list[str]:
        return [one.text for one in self.out if isinstance(one, LogEvent) and one.kind == "refused"]

    def nested(self, group: str = "g") -> str:
        """A worker of driver a's job, on node 0, as a client."""
        assert isinstance(self.launch("a", [0], group), Launched)
        id = f"a{group}-0"
        self.tell("a:open", WorkerReady(id, 77, Endpoint("host-open", "ipc://w")))
        hello = client_hello("w-1", role="worker", namespace="job-a", worker_id=id, token=self.head.jobs.token("job-a"))
        self.keyed["aw"] = self.head.keys._jobs["job-a"]
        self.ask("aw", hello)
        return "aw"


ROBOTS = LaunchRules(("@robots",))


def test_node_takes_launches_of_listed_drivers_alone():
    head = Kit(ROBOTS)
    assert isinstance(head.launch("a", [0, 1]), Launched)
    (order,) = [one for one in head.orders() if one.workers[0].node_rank == 1]
    assert (order.driver, order.driver_groups, order.nested) == ("a", ("robots",), False)
    refused = head.launch("b", [0, 1])
    assert isinstance(refused, Refuse)
    assert refused.kind == "authentication"
    assert "node lab does not admit driver 'b': drivers in [admit]" in refused.text
    assert head.orders() == []
    assert ["refused driver 'b'" in text for text in head.refusals()] == [True]
    assert isinstance(head.launch("b", [0]), Launched)


def test_key_limits_a_driver_to_nodes_by_name_and_label():
    head = Kit(LaunchRules(), zone="lab-1")
    head.driver("c", "C", nodes=("o*",))
    head.join("c")
    assert isinstance(head.launch("c", [0]), Launched)
    refused = head.launch("c", [1], "h")
    assert isinstance(refused, Refuse)
    assert "node lab is none of the nodes that the key of driver 'c' is limited to ('o*')" in refused.text
    assert "keys enroll c --driver --replace --nodes" in refused.text
    answer = head.ask(
        "admin", AddKey(key("E"), "driver", "c", "me", None, KeyLimits(nodes=("zone=lab-*",)), None, True)
    )
    assert isinstance(answer, Keys)
    assert isinstance(head.launch("c", [1], "h"), Launched), "the newest key of the driver counts"
    assert isinstance(head.launch("c", [0], "i"), Refuse)
    again = head.ask("admin", AddKey(key("F"), "driver", "c", "me", None, KeyLimits(), None, True))
    assert again.keys[0].limits.nodes == ("zone=lab-*",), "a successor has the limits of the key that it replaces"


def test_limits_that_are_no_driver_s_are_refused():
    head = Kit(LaunchRules())
    for role, limits in (
        ("agent", {"nodes": ("x",)}),
        ("driver", {"groups": ("local",)}),
        ("driver", {"groups": ("@x",)}),
    ):
        answer = head.ask("admin", AddKey(key("X"), role, "x", "me", None, KeyLimits(**limits)))
        assert isinstance(answer, Refuse), (role, limits)


def test_workers_launch_where_nested_launches_are_admitted():
    head = Kit(LaunchRules(nested=False))
    worker = head.nested()
    assert isinstance(head.launch(worker, [0], "inner"), Launched)
    assert [one.nested for one in head.orders()] == [True]
    refused = head.launch(worker, [1], "other")
    assert isinstance(refused, Refuse)
    assert "nested in [admit]" in refused.text
    assert isinstance(head.launch("a", [1], "own"), Launched), "its driver may"


def test_added_ranks_and_restarts_are_checked_with_the_present_rules():
    head = Kit(LaunchRules())
    policy = RestartPolicy(max_restarts=3, backoff_s=0.0)
    assert isinstance(head.launch("b", [1], restart=policy), Launched)
    head.rules(ROBOTS)
    assert any("has new rules; it admits '@robots'" in one.text for one in head.out if isinstance(one, LogEvent))
    more = [replace(one, id="bg-1", rank=1, world_size=2) for one in specs("g", [1], "job-b")]
    refused = head.ask("b", AddRanks("job-b", "g", more))
    assert isinstance(refused, Refuse)
    assert "does not admit driver 'b'" in refused.text
    head.tell("a:lab", WorkerReady("bg-0", 77, Endpoint("host-lab", "ipc://w")))
    head.tell("a:lab", WorkerExited("bg-0", ExitReport("exited", 1)))
    assert head.orders() == []
    (text,) = [text for text in head.refusals() if "again" in text]
    assert "does not admit driver 'b'" in text


def test_clients_are_told_which_nodes_are_closed_to_them():
    head = Kit(ROBOTS)
    for driver, closed in (("a", False), ("b", True)):
        answer = head.ask(driver, GetNodes(2))
        assert isinstance(answer, Nodes)
        assert [bool(one.closed) for one in answer.nodes] == [False, closed]
        status = head.ask(driver, GetStatus())
        assert isinstance(status, Status)
        assert {one.report.node_id: bool(one.closed) for one in status.nodes} == {"open": False, "lab": closed}


def test_node_that_does_not_admit_a_driver_runs_and_sends_nothing_for_it():
    head = Kit(ROBOTS)
    for body in (EnumerateHardware("lab", HardwareQuestion("Arm", 1)), AskNode("lab", TraceQuestion("job-b"))):
        refused = head.ask("b", body)
        assert isinstance(refused, Refuse)
        assert "does not admit driver 'b'" in refused.text
    head.ask("a", EnumerateHardware("lab", HardwareQuestion("Arm", 1)))
    (order,) = [one.body for one in head.out if isinstance(one, Notify)]
    assert isinstance(order, LookForHardware)
    assert order.launcher.groups == ("robots",)


def test_refusal_by_an_agentd_is_an_event():
    head = Kit(LaunchRules())
    head.launch("b", [1])
    head.tell("a:lab", WorkerExited("bg-0", ExitReport("start_failed", reason="node lab does not admit b"), True))
    assert any("agent 'lab' refused to start bg-0" in text for text in head.refusals())


@pytest.mark.parametrize("robots", [False, True])
def test_robots_of_a_node_are_given_to_listed_drivers(robots):
    head = Kit(LaunchRules(robots=("@robots",)))
    claims = (Claim("arm-1", "Arm 1"),) if robots else ()
    assert isinstance(head.launch("b", [1], claims=claims), Refuse if robots else Launched)
    assert isinstance(head.launch("a", [1], "h", claims=claims), Launched)
