"""Refusals because of something that is held name its holder: user, script, process, machine and age."""

from __future__ import annotations

import re

import pytest
from head_kit import HeadKit, client_hello, specs
from keys_kit import KeysKit
from msgspec.structs import replace

from rlinf_actors.head.commands import Refuse
from rlinf_actors.head.owners import first_of, most_of
from rlinf_actors.head.quotas import LIMITS
from rlinf_actors.wire.agent_messages import Goodbye, StartWorkers
from rlinf_actors.wire.client_messages import Detach, Done, GetEvents, GetNodes, Launch
from rlinf_actors.wire.launch_messages import LaunchPart, batches_of
from rlinf_actors.wire.program import Program
from rlinf_actors.wire.values import Claim

STARTED = 1_001_000.0  # of KeysKit's wall clock, at which its head starts
TRAIN = Program("ann", "laptop", "/home/ann/train.py", STARTED - 3 * 3600)
TRAINING = "ann's train.py (pid 4242 on n0, started 3 h ago)"


@pytest.fixture
def kit() -> KeysKit:
    """Two nodes, and the job of ann, whose driver runs on node n0."""
    kit = KeysKit()
    for letter, name in zip("ab", ("a:n0", "a:n1"), strict=True):
        kit.give(name, letter)
        assert not isinstance(kit.node(name.removeprefix("a:")), Refuse)
    for letter, name in zip("xy", ("ann", "bob"), strict=True):
        kit.give(name, letter, role="driver")
    kit.driver("ann", namespace="ann", host="host-n0", pid=4242, program=TRAIN)
    kit.driver("bob", namespace="bob", program=replace(TRAIN, user="bob", script="-c"))
    kit.nodes(2, peer="ann")
    return kit


def launch(kit: HeadKit, group: str, peer: str = "ann", id: str = "", cls: str = "m:C", again: bool = False):
    arm = Claim("Franka:10.0.1.1", "Franka 10.0.1.1")
    workers = [replace(spec, claims=(arm,)) for spec in specs(group, [0], peer, id)]
    return kit.ask(peer, Launch(peer, group, cls, workers, get_if_exists=again))


def test_refused_robots_names_and_namespaces_are_refused_with_the_driver_that_holds_them(kit):
    kit.wait(0.5)  # a head that has just started grants no robot
    launch(kit, "arms")
    assert f"held by group 'arms' of job 'ann', owned by {TRAINING}; its worker" in launch(kit, "g", "bob").text
    assert f"owned by {TRAINING}: give this one another name" in launch(kit, "arms", id="again").text
    other = launch(kit, "arms", id="again", cls="m:Other", again=True)
    assert f"in job 'ann', owned by {TRAINING}, is of class m:C" in other.text
    kit.keyed["bob2"] = kit.keyed["bob"]
    why = kit.ask("bob2", client_hello("bob2", namespace="ann")).text
    assert why.endswith(f"it is the job of driver 'ann', run by {TRAINING}")
    assert [order.owned_by for order in kit.sent(StartWorkers)] == []


def part(number: int) -> LaunchPart:
    launch = f"l{number}"
    return LaunchPart("ann", f"g{number}", launch, 0, batches_of(specs(f"g{number}", [0], "ann", launch)))


READ = GetEvents(-1, namespace="ann", wait_s=60.0)


@pytest.mark.parametrize(
    ("kind", "asked", "held"),
    [
        ("requests", lambda n: GetNodes(99, 5.0), f"of {TRAINING}: 2"),
        ("launch parts", part, f"of {TRAINING}: 2"),
        ("readers", lambda n: READ, f"of {TRAINING} of driver 'ann': 2"),
        ("readers of a key", lambda n: READ, f"of {TRAINING}: 2"),
    ],
)
def test_a_quota_that_is_used_up_says_by_whom(kit, monkeypatch, kind, asked, held):
    monkeypatch.setitem(LIMITS, kind, LIMITS[kind]._replace(most=2))
    for number in range(2):
        assert not isinstance(kit.ask("ann", asked(number)), Refuse)
    refused = kit.ask("ann", asked(2))
    assert isinstance(refused, Refuse)
    assert "2 " in refused.text
    assert refused.text.endswith(f". They are {held}")


def test_only_the_largest_holders_are_named():
    assert first_of(["a", "b"], str) == "a; b"
    assert first_of(["a", "b", "c", "d", "e"], str) == "a; b; c; and 2 more"
    assert most_of({"a": 1, "b": 9}, str) == "of b: 9; of a: 1"
    assert most_of({"a": 1, "b": 9, "c": 2, "d": 5, "e": 4}, str) == "of b: 9; of d: 5; of e: 4; and of 2 more"


def test_agentd_gets_the_owner_of_the_workers_that_it_starts(kit):
    kit.wait(0.5)
    launch(kit, "arms")
    (order,) = kit.sent(StartWorkers)
    assert re.fullmatch(r"ann's train\.py \(pid 4242 on n0, started \d{4}-\d\d-\d\d \d\d:\d\d\)", order.owned_by)


def test_drivers_beyond_the_first_are_counted(kit):
    kit.keyed["ann2"] = kit.keyed["ann"]
    kit.driver("ann2", namespace="ann")
    kit.keyed["bob2"] = kit.keyed["bob"]
    assert kit.ask("bob2", client_hello("bob2", namespace="ann")).text.endswith(f"run by {TRAINING} and 1 more")


def test_detached_group_and_ended_owner_are_said_as_such(kit):
    kit.wait(0.5)
    launch(kit, "arms")
    assert isinstance(kit.ask("ann", Detach("ann", "arms", ["arms-0"])), Done)
    kit.tell("ann", Goodbye("done"))
    assert "'ann', which is detached: no driver owns it; its worker" in launch(kit, "g", "bob").text


def test_driver_on_another_machine_is_named_with_that_machine(kit):
    kit.wait(0.5)
    launch(kit, "g", "bob")
    assert "owned by bob's python -c (pid 100 on laptop, started 3 h ago);" in launch(kit, "h").text
