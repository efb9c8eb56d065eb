"""The event log: kept events, their readers, and waiting readers."""

from __future__ import annotations

import logging
import types
import typing

import pytest
from head_kit import HeadKit, client_hello

from rlinf_actors.head import event_log
from rlinf_actors.head.commands import Answer, Identity, LogEvent, NoticeReceived, Refused
from rlinf_actors.head.event_log import ERRORS, WARNINGS, EventLog, level
from rlinf_actors.head.quotas import LIMITS
from rlinf_actors.head.timers import TimerHeap
from rlinf_actors.wire.agent_messages import Beat, Goodbye
from rlinf_actors.wire.client_messages import EStop, Events, GetEvents
from rlinf_actors.wire.event_values import EventKind
from rlinf_actors.wire.values import ExitReport


class LogKit:
    """An event log with its later answers, in place of the coordinator."""

    def __init__(self, **options: typing.Any) -> None:
        self.identity = Identity("log", "1")
        self.timers = TimerHeap()
        self.now, self.wall = 0.0, 9.0
        self.sent: dict[int, Events] = {}
        self.clients = self.nodes = types.SimpleNamespace(of_peer=lambda peer: None)
        self.log = EventLog(self, **options)

    def emit(self, command: object) -> None:
        assert isinstance(command, Answer)
        assert isinstance(command.body, Events)
        assert command.id not in self.sent, "each question gets one answer"
        self.sent[command.id] = command.body

    def add(self, *texts: str, namespace: str = "", wall: float = 1.0) -> None:
        for text in texts:
            self.enter(LogEvent("worker_died", text, namespace=namespace), wall, namespace)

    def enter(self, event: LogEvent, wall: float = 1.0, whose: str = "") -> None:
        self.wall = wall
        self.log.add(event, whose)
        self.wall = 9.0

    def ask(self, id: int = 1, now: float = 0.0, **question: object) -> Events | None:
        self.now = now
        return self.log.ask(b"p", id, GetEvents(**question), lambda namespace, owner: True)


def texts(events: Events | None) -> list[str]:
    assert events is not None
    return [event.text for event in events.events]


def test_events_are_numbered_from_one_and_have_a_time():
    kit = LogKit()
    kit.add("a", wall=5.0)
    kit.add("b", wall=6.0)
    answer = kit.ask()
    assert [(event.seq, event.at, event.text) for event in answer.events] == [(1, 5.0, "a"), (2, 6.0, "b")]
    assert (answer.log, answer.at, answer.next, answer.missing, answer.more) == ("log", 9.0, 2, 0, False)


def test_reader_continues_after_its_last_event():
    kit = LogKit()
    kit.add("a", "b", "c")
    first = kit.ask(limit=2)
    assert (texts(first), first.next, first.more) == (["a", "b"], 2, True)
    second = kit.ask(since=first.next, log="log", limit=2)
    assert (texts(second), second.next, second.more) == (["c"], 3, False)
    assert texts(kit.ask(since=3)) == []
    assert texts(kit.ask(since=99)) == []


def test_reader_learns_how_many_events_are_missing():
    kit = LogKit(kept=3)
    kit.add(*"abcdefg")
    answer = kit.ask()
    assert (texts(answer), answer.missing, answer.events[0].seq) == (["e", "f", "g"], 4, 5)
    answer = kit.ask(since=2)
    assert (texts(answer), answer.missing) == (["e", "f", "g"], 2)
    assert kit.ask(since=4).missing == 0


def test_log_is_bounded_in_length_and_keeps_the_newest_event():
    kit = LogKit(kept_chars=100)
    for name in "ab":
        kit.enter(LogEvent("worker_died", name, exit=ExitReport("exited", stderr_tail=["x" * 60])))
    assert texts(kit.ask()) == ["b"]
    kit.enter(LogEvent("worker_died", "c" * 500))
    assert texts(kit.ask()) == ["c" * 500]


def test_events_of_the_largest_share_are_evicted():
    kit = LogKit(kept=10)
    kit.add("a", "b", namespace="quiet")
    kit.add("node")
    kit.enter(LogEvent("refused", "who"))
    kit.add(*(f"{n}" for n in range(50)), namespace="loud")
    answer = kit.ask()
    assert texts(answer) == ["a", "b", "node", "who", *(f"{n}" for n in range(44, 50))]
    assert (answer.missing, answer.next, answer.more) == (44, 54, False)
    for _ in range(50):
        kit.enter(LogEvent("refused", "who"))
    kept = texts(kit.ask())
    assert kept[:3] == ["a", "b", "node"]
    assert kept.count("who") in (3, 4)


def test_newest_jobs_keep_their_events_however_many_jobs_there_were(monkeypatch):
    monkeypatch.setattr(event_log, "JOBS", 3)
    kit = LogKit(kept=20)
    said = [f"job {job} {what}" for job in range(50) for what in ("starts", "runs", "ends")]
    for text in said:
        kit.add(text, namespace=text.split()[1])
    assert texts(kit.ask()) == said[-20:]
    assert len(kit.log._shares) == 4, "one is that of all earlier jobs"


def test_shares_of_members_stay_apart_however_many_there_are(monkeypatch):
    monkeypatch.setattr(event_log, "JOBS", 2)
    kit = LogKit(kept=20)
    for name in "abcdefgh":
        kit.enter(LogEvent("driver_joined", name, namespace="ns"), whose=f"driver {name}")
    kit.add(*(f"{n}" for n in range(50)), namespace="loud")
    assert texts(kit.ask()) == [*"abcdefgh", *(f"{n}" for n in range(38, 50))]


def test_job_that_goes_on_has_its_share_again(monkeypatch):
    monkeypatch.setattr(event_log, "JOBS", 2)
    kit = LogKit(kept=6)
    kit.add("a1", namespace="a")
    for name in "bcd":
        kit.add(f"{name}1", f"{name}2", namespace=name)
    assert texts(kit.ask()) == ["b1", "b2", "c1", "c2", "d1", "d2"], "a was silent for longest"
    kit.add("a2", namespace="a")
    kit.add("d3", namespace="d")
    assert texts(kit.ask()) == ["c1", "c2", "d1", "d2", "a2", "d3"]


def test_reader_of_several_pages_learns_once_of_dropped_events():
    kit = LogKit(kept=6)
    kit.add("a", "b", namespace="quiet")
    kit.add(*"cdefghij", namespace="loud")
    first = kit.ask(limit=2)
    assert (texts(first), first.missing, first.next, first.more) == (["a", "b"], 0, 2, True)
    second = kit.ask(since=first.next, limit=2)
    assert (texts(second), second.missing, second.more) == (["g", "h"], 4, True)
    third = kit.ask(since=second.next, limit=2)
    assert (texts(third), third.missing, third.more) == (["i", "j"], 0, False)


def test_an_answer_is_bounded_in_length_but_never_empty():
    kit = LogKit()
    kit.add("a" * 700_000, "b" * 700_000)
    first = kit.ask()
    assert (len(first.events), first.more) == (1, True)
    assert len(kit.ask(since=1).events) == 1


def test_number_of_another_log_is_ignored():
    kit = LogKit()
    kit.add("a", "b")
    assert texts(kit.ask(since=2, log="of the head before", wait_s=5.0)) == ["a", "b"]


def test_events_of_a_job_are_for_that_job_only():
    kit = LogKit()
    kit.add("mine", namespace="ns")
    kit.add("theirs", namespace="other")
    kit.add("of all")
    assert texts(kit.ask(namespace="ns")) == ["mine", "of all"]
    assert texts(kit.ask()) == ["mine", "theirs", "of all"]
    kit.add("theirs", namespace="other")
    assert kit.ask(namespace="ns", since=3).next == 4  # events for others are skipped only once


def test_waiting_reader_is_answered_by_an_event_that_it_may_see():
    kit = LogKit()
    kit.add("old")
    assert kit.ask(7, namespace="ns", since=-1, wait_s=5.0) is None
    kit.add("theirs", namespace="other")
    kit.log.flush()
    assert kit.sent == {}
    kit.add("a", "b", namespace="ns")
    kit.log.flush()
    assert texts(kit.sent[7]) == ["a", "b"]
    kit.add("c")
    kit.log.flush()
    assert set(kit.sent) == {7}


def test_wait_without_events_returns_an_empty_answer():
    kit = LogKit()
    assert kit.ask(7, wait_s=5.0, now=10.0) is None
    assert kit.timers.next_deadline() == 15.0
    kit.timers.run_due(14.9)
    assert kit.sent == {}
    kit.timers.run_due(15.0)
    assert texts(kit.sent[7]) == []
    assert kit.timers.next_deadline() == float("inf")


def test_waiting_readers_are_bounded():
    kit = LogKit()
    for id in range(LIMITS["readers"].most):
        assert kit.ask(id, wait_s=1e9) is None
    assert kit.timers.next_deadline() == 60.0
    with pytest.raises(Refused, match=r"They are of a command of a local process: 1024$"):
        kit.ask(LIMITS["readers"].most, wait_s=1.0)
    kit.log.forget(b"p")
    assert kit.ask(LIMITS["readers"].most, wait_s=1.0) is None


# --- events of the coordinator ---


def event_kinds(kit: HeadKit, peer: str = "cli", **question: object) -> list[tuple[str, str]]:
    answer = kit.ask(peer, GetEvents(**question))
    assert isinstance(answer, Events)
    return [(event.kind, event.group or event.node) for event in answer.events]


def test_log_has_the_events_of_a_job_from_start_to_end():
    kit = HeadKit()
    kit.head.started([], 1.0)
    kit.cluster()
    kit.launch("g", [0, 0])
    kit.ready("a:n0", "g-0")
    kit.ready("a:n0", "g-0")  # repeated
    kit.exited("a:n0", "g-0", kind="signalled", exit_code=None, signal=9, oom="suspected", stderr_tail=["oops"])
    kit.exited("a:n0", "g-1", kind="stopped")
    kit.tell("d1", Goodbye("done"))
    assert event_kinds(kit) == [
        ("head_started", ""),
        ("node_joined", "n0"),
        ("driver_joined", ""),
        ("group_launched", "g"),
        ("worker_started", "g"),
        ("worker_died", "g"),
        ("worker_stopped", "g"),
        ("group_ended", "g"),
        ("driver_ended", ""),
    ]
    died = kit.ask("cli", GetEvents()).events[5]
    who = "worker g:0 (process 77) of job ns on node n0"
    assert died.text == f"{who} was ended by signal 9 (SIGKILL); out of memory suspected"
    assert (died.rank, died.worker_id, died.node_id, died.pid) == (0, "g-0", "n0", 77)
    assert died.exit == ExitReport("signalled", None, 9, "suspected", ["oops"])


@pytest.mark.parametrize(("group", "kind"), [("channel@c", "worker_stopped"), ("g", "worker_died")])
def test_end_of_a_closed_channels_host_is_not_logged_as_a_death(group, kind):
    kit = HeadKit()
    kit.cluster()
    kit.launch(group, [0])
    kit.ready("a:n0", f"{group}-0")
    start = len(event_kinds(kit))
    kit.exited("a:n0", f"{group}-0", kind="exited", exit_code=0)
    ended, group_ended = kit.ask("cli", GetEvents(since=start)).events
    assert ended.kind == kind
    assert group_ended.text.endswith("its worker died" if kind == "worker_died" else "its worker was stopped")


def test_log_has_silence_return_and_loss_of_a_node():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    start = len(event_kinds(kit))
    kit.wait(3.5)
    kit.tell("a:n0", Beat("n0-1"))
    kit.wait(20.0)
    assert [kind for kind, about in event_kinds(kit, since=start) if about == "n0"] == [
        "node_suspect",
        "node_heard",
        "node_suspect",
        "node_lost",
    ]
    (died,) = [event for event in kit.ask("cli", GetEvents(since=start)).events if event.kind == "worker_died"]
    who = "worker g:0 of job ns on node n0"
    assert died.text == f"{who} is gone with its node: node n0 (10.0.0.1): it was silent for 10 s"


def test_every_line_of_the_heads_log_is_an_event():
    kit = HeadKit()
    lines = []
    for act in (
        lambda: kit.node("n0"),
        lambda: kit.driver(),
        lambda: kit.driver("d2", role="king"),
        lambda: kit.nodes(1),
        lambda: kit.launch("g", [0]),
        lambda: kit.ask("cli", EStop("kim", "smoke")),
        lambda: kit.ask("cli", EStop("kim", release=True)),
        lambda: kit.tell("a:n0", Goodbye("off")),
    ):
        act()
        lines += kit.records()
    assert [event.text for event in kit.ask("cli", GetEvents()).events] == lines
    assert len(lines) == 9


def test_driver_reads_events_of_its_own_job_only():
    kit = HeadKit()
    kit.cluster()
    kit.ask("d2", client_hello("d2", namespace="other"))
    kit.launch("g", [0])
    assert event_kinds(kit, "d1", namespace="ns") == [
        ("node_joined", "n0"),
        ("driver_joined", ""),
        ("group_launched", "g"),
    ]
    assert event_kinds(kit, "d2", namespace="other") == [("node_joined", "n0"), ("driver_joined", "")]
    for namespace in ("ns", None):
        refused = kit.ask("d2", GetEvents(namespace=namespace))
        assert refused.kind == "authentication"


def test_waiting_driver_is_answered_at_once_and_forgotten_at_its_end():
    kit = HeadKit()
    kit.cluster()
    last = kit.ask("d1", GetEvents(namespace="ns")).next
    assert kit.ask("d1", GetEvents(last, "epoch", "ns", wait_s=5.0)) is None
    kit.launch("g", [0])
    ((peer, answer),) = [(peer, body) for peer, body in kit.answers() if isinstance(body, Events)]
    assert (peer, texts(answer)) == ("d1", ["group 'g' of job 'ns' was launched: m:C, rank 0"])
    assert kit.ask("d1", GetEvents(answer.next, "epoch", "ns", wait_s=5.0)) is None
    commands = kit.head.handle(NoticeReceived(b"d1", Goodbye("done")), kit.now)
    assert not [c for c in commands if isinstance(c, Answer)]
    kit.wait(6.0)
    assert [body for _, body in kit.answers() if isinstance(body, Events)] == []


def test_nodes_of_one_host_name_are_told_apart_by_their_ranks_while_there_are_several():
    kit = HeadKit()
    for id in ("n0", "n1"):
        kit.node(id, hostname="lab")
    kit.driver()
    kit.nodes(2)
    kit.launch("g", [0, 1])
    kit.ready("a:n1", "g-1")
    kit.tell("a:n1", Goodbye("off"))
    kit.ready("a:n0", "g-0")
    found = kit.ask("cli", GetEvents()).events
    texts = [event.text for event in found if "lab" in event.text and event.kind != "node_joined"]
    assert [text.partition(" on node ")[2] or text for text in texts] == [
        "lab (rank 1) is up",
        "node lab (rank 1) (10.0.0.1) is gone: off",
        "lab (rank 1) is gone with its node: node lab (10.0.0.1): off",
        "lab is up",
    ]
    assert {event.node for event in found if event.kind.startswith("worker")} == {"lab"}


def test_deaths_lost_nodes_and_emergency_stops_are_warnings_in_the_log():
    kinds = set(typing.get_args(EventKind))
    assert kinds >= WARNINGS
    assert kinds >= ERRORS
    for kind in ("worker_died", "node_lost", "lease_lost", "estop"):
        assert level(kind) == logging.WARNING
    for kind in ("worker_stopped", "node_left", "group_ended", "driver_ended"):
        assert level(kind) == logging.INFO
    assert level("robot_conflict") == logging.ERROR
