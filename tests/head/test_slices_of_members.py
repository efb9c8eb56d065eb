"""What long work of one member means for the messages of others, and what ends the waits that it causes."""

from __future__ import annotations

from typing import Any

import pytest
from head_kit import HeadKit, client_hello, specs

from rlinf_actors.errors import ProtocolError
from rlinf_actors.head.commands import (
    Answer,
    HoldBack,
    LongMessage,
    NoticeReceived,
    Notify,
    Refuse,
    RequestReceived,
    SliceDue,
)
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import Goodbye
from rlinf_actors.wire.client_messages import (
    FindGroup,
    Handles,
    Launch,
    Launched,
    StopCluster,
    StopGroup,
    WatchClients,
    WorkerChanged,
)


class Steps(HeadKit):
    """A head whose slices the test runs one by one."""

    def begin(self, event: Any) -> list[Any]:
        done = self.head.apply(event, self.now, self.wall)
        return self._keep(list(done) + list(self.head.finish_turn()))

    def rest(self) -> list[Any]:
        done: list[Any] = []
        while self.head.unfinished():
            done += self.begin(SliceDue())
        return done

    def asking(self, peer: str, body: Any, member: Member | None = None) -> Any:
        event = RequestReceived(peer.encode(), next(self.ids), body)
        return event if member is None else RequestReceived(event.peer, event.id, body, member)


@pytest.fixture
def kit() -> Steps:
    made = Steps()
    made.cluster(4)
    made.out = []
    return made


def busy(peer: bytes, slices: int = 50) -> LongMessage:
    """A message of *peer* whose decoding takes so many slices."""

    def decoding() -> Any:
        for _ in range(slices):
            yield

    return LongMessage(peer, decoding())


def launch(count: int, group: str = "new", namespace: str = "ns") -> Launch:
    return Launch(namespace, group, "m:C", specs(group, [rank % 4 for rank in range(count)], namespace))


def answers(out: list[Any]) -> list[int]:
    return [one.id for one in out if isinstance(one, (Answer, Refuse))]


def test_message_about_the_group_of_another_job_does_not_wait_in_its_queue(kit: Steps) -> None:
    """Else a busy member holds up the stops of another's groups, with each of its connections."""
    kit.launch("g", [0])
    kit.driver("d2", namespace="other")
    kit.begin(busy(b"d2"))
    kit.begin(kit.asking("d2", FindGroup("ns", "g")))
    stop = kit.begin(kit.asking("d1", StopGroup("ns", "g", 0.0)))
    assert any(isinstance(one, Notify) and type(one.body).__name__ == "StopWorkers" for one in stop)
    refused = [one for one in kit.rest() if isinstance(one, Refuse)]
    assert [(one.peer, one.kind) for one in refused] == [(b"d2", "authentication")]


def test_time_of_slices_is_that_of_the_member_that_asked(kit: Steps) -> None:
    seen = []
    for event in (busy(b"d1", 2), LongMessage(b"d1", busy(b"d1", 2).decoding, Member("driver", "kim", "", "KEY"))):
        kit.begin(event)
        kit.begin(SliceDue())
        seen.append(kit.head.slices.worked_for)
        kit.rest()
    assert seen == [b"d1", "KEY"]
    kit.launch("g", [0] * 300)
    kit.begin(NoticeReceived(b"a:n0", Goodbye("maintenance")))
    kit.begin(SliceDue())
    assert kit.head.slices.worked_for == ""


def test_connection_goes_on_after_a_notice_that_fails_in_a_later_slice(kit: Steps, monkeypatch: Any) -> None:
    def failing(client: Any, message: Any) -> Any:
        yield
        yield
        raise ProtocolError("not expected")

    monkeypatch.setitem(kit.head._handlers._notices_of_clients, Handles, failing)  # type: ignore[index]
    out = kit.begin(NoticeReceived(b"d1", Handles([]))) + kit.rest()
    assert [one for one in out if isinstance(one, HoldBack)] == [HoldBack(b"d1", True), HoldBack(b"d1", False)]
    assert kit.head.unexpected == 1
    assert kit.ask("d1", FindGroup("ns", "g")) is not None


def test_connection_goes_on_after_work_that_raises(kit: Steps) -> None:
    def work() -> Any:
        yield
        raise ValueError("a bug")

    kit.head.slices.start(work(), [b"d1"])
    with pytest.raises(ValueError, match="a bug"):
        kit.begin(SliceDue())
    assert kit.head.out == [HoldBack(b"d1", False)]
    assert not kit.head.slices.pending


def test_cluster_ends_also_if_a_launch_was_under_way(kit: Steps) -> None:
    """The group of that launch was stopped by nobody, and the cluster waited for its end."""
    kit.launch("g", [0])
    kit.begin(kit.asking("d1", launch(3000)))
    assert kit.head.groups.get("ns", "new") is None  # still being checked
    asked = kit.asking("tool", StopCluster())
    out = kit.begin(asked) + kit.rest()
    assert [one.text for one in out if isinstance(one, Refuse)] == ["the cluster is being stopped"]
    assert asked.id not in answers(out)
    kit.exited("a:n0", "g-0")
    assert asked.id in answers(kit.out)


def test_lookups_that_waited_for_a_launch_are_answered_one_after_the_other(kit: Steps) -> None:
    for n in range(50):
        kit.driver(f"w{n}")
        assert kit.ask(f"w{n}", FindGroup("ns", "new", wait_s=60.0)) is None
    out = kit.begin(kit.asking("d1", launch(4)))
    assert len(answers(out)) < 5
    found = [one for one in out + kit.rest() if isinstance(one, Answer) and isinstance(one.body, Launched)]
    assert {one.peer for one in found} == {b"d1", *(b"w%d" % n for n in range(50))}


def test_no_notice_has_an_older_state_than_one_before_it() -> None:
    """With more receivers than one slice serves, a state made before a worker's end was sent after it."""
    kit = Steps()
    kit.cluster(1)
    kit.launch("g", [0])
    for n in range(1200):
        kit.driver(f"w{n}")
        kit.ask(f"w{n}", FindGroup("ns", "g"))
    worker = kit.head.groups.get("ns", "g").workers["g-0"]
    kit.begin(SliceDue())
    out: list[Any] = []
    for event in ("ready", "exited"):
        worker.step(event)
        kit.head.groups.changed(worker)
        out += kit.begin(SliceDue())
    out += kit.rest()
    told: dict[bytes, list[str]] = {}
    for one in out:
        if isinstance(one, Notify) and isinstance(one.body, WorkerChanged):
            told.setdefault(one.peer, []).append(one.body.workers[0].state)
    assert len(told) == 1201
    assert {tuple(states) for states in told.values()} <= {("running", "gone"), ("gone", "gone"), ("gone",)}
    assert ("gone", "gone") in {tuple(states) for states in told.values()}
    later = [
        one.body.workers[0].state for one in out if isinstance(one, Notify) and isinstance(one.body, WorkerChanged)
    ]
    assert "running" not in later[later.index("gone") :]


def restarted(nodes: int, held: int) -> Steps:
    """A head that waits for so many nodes of the one before, and has held back so many hellos and requests."""
    kit = Steps()
    for n in range(nodes):
        kit.node(f"n{n}", ip=f"10.0.{n >> 8}.{n & 255}", rank=n)
    kit.restart()
    kit.now += 1.0
    for n in range(held):
        kit.begin(kit.asking(f"w{n}", client_hello(f"w{n}")))
    return kit


def test_wait_for_lost_nodes_ends_in_slices() -> None:
    kit = restarted(500, 300)
    assert kit.head.clients.get("w0") is None
    kit.now += kit.timing.patience_s
    states, out, turns = [], [], 0
    out += kit.begin(SliceDue())
    while kit.head.unfinished():
        states.append(len(kit.head.nodes.missing))
        out += kit.begin(SliceDue())
        turns += 1
    assert states[0] > 300
    assert not kit.head.nodes.missing
    assert len(answers(out)) == 300
    assert max(len(answers([one])) for one in out) == 1
    assert turns > 100


def test_later_messages_of_a_connection_come_after_its_held_ones() -> None:
    kit = restarted(2, 300)
    kit.now += kit.timing.patience_s
    kit.begin(SliceDue())
    while not kit.head.early._released:
        kit.begin(SliceDue())
    late = kit.begin(NoticeReceived(b"w299", WatchClients(["x"])))
    assert not [one for one in late if isinstance(one, Notify) and one.peer == b"w299"]  # not asked to say hello
    kit.rest()
    assert kit.head.clients.expected("x")
