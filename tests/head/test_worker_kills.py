"""Kills of single workers: who may, what is killed, and that the answer waits for the end."""

from __future__ import annotations

import pytest
from head_kit import HeadKit
from keys_kit import two_jobs

from rlinf_actors.head.commands import Answer, Refuse
from rlinf_actors.wire.agent_messages import StopWorkers
from rlinf_actors.wire.client_messages import KillWorker, WorkerKilled


def cluster() -> HeadKit:
    kit = HeadKit()
    kit.cluster(2)
    kit.launch("g", [0, 1])
    for node in (0, 1):
        kit.ready(f"a:n{node}", f"g-{node}")
    return kit


def test_kill_is_answered_when_the_agentd_has_reported_the_end():
    kit = cluster()
    assert kit.ask("tool", KillWorker("ns", "g", "g-1", "kim", "it hangs")) is None
    assert kit.sent(StopWorkers) == [StopWorkers(["g-1"], 0.0, "kim killed it: it hangs")]
    assert kit.ask("other", KillWorker("ns", "g", "g-1", "kim")) is None
    kit.exited("a:n1", "g-1", kind="stopped", exit_code=None, signal=9)
    found = [body for _, body in kit.answers() if isinstance(body, WorkerKilled)]
    assert [(one.exit.kind, one.exit.signal) for one in found] == [("stopped", 9)] * 2
    again = kit.ask("tool", KillWorker("ns", "g", "g-1", "kim"))
    assert (again.exit.signal, kit.group_states()) == (9, {"g": kit.group_states()["g"]})
    for wrong in (
        KillWorker("ns", "g", "g-7", "kim"),
        KillWorker("ns", "h", "g-0", "kim"),
        KillWorker("x", "g", "g-0", ""),
    ):
        refusal = kit.ask("tool", wrong)
        assert isinstance(refusal, Refuse)
        assert refusal.kind == "not_found"


def test_kill_of_a_worker_whose_node_is_lost_says_that_its_end_is_not_certain():
    kit = cluster()
    kit.ask("tool", KillWorker("ns", "g", "g-1", "kim"))
    answers = []
    for _ in range(30):
        kit.beat("a:n0")
        kit.beat("d1")
        kit.wait(1)
        answers += [command.body for command in kit.out if isinstance(command, Answer)]
    assert [one.exit.kind for one in answers if isinstance(one, WorkerKilled)] == ["node_lost"]


@pytest.mark.parametrize("peer", ["bob", "w", "a:n1"])
def test_stranger_to_a_job_may_not_kill_its_workers(peer):
    kit = two_jobs()
    answer = kit.ask(peer, KillWorker("ann", "g", "g-0", peer))
    assert isinstance(answer, Refuse)
    assert answer.kind == "authentication"
    assert not kit.sent(StopWorkers)
