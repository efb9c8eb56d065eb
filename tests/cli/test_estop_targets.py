"""The heads that get an emergency stop, if other users publish records of their own."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pace
import pytest
import zmq
from estop_kit import Machine

from rlinf_actors.cli import estop_targets
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.blocking_client import BlockingClient, HeadAnswered, HeadDown, RemoteHead
from rlinf_actors.net.framing import pack, unpack
from rlinf_actors.net.head_records import PREFIX, SUFFIX, HeadRecord, MachineRecords
from rlinf_actors.net.socket_security import Security
from rlinf_actors.settings import CLIENT_CONFIG, HEAD, HEADS_DIR
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.client_messages import EStop, EStopped
from rlinf_actors.wire.control_codec import Failed, Reply
from rlinf_actors.wire.values import RobotStop

OTHER = 61008
REAL = "tcp://127.0.0.1:6380"
THEIRS = "ipc:///home/m/head"


@pytest.fixture
def known(monkeypatch, tmp_path) -> Callable[..., estop_targets.KnownHeads]:
    """Return a function that gives the known heads for these records, as root sees them."""
    (tmp_path / "client.toml").write_text("")
    monkeypatch.setenv(CLIENT_CONFIG, str(tmp_path / "client.toml"))
    monkeypatch.setenv(HEADS_DIR, str(tmp_path))
    monkeypatch.delenv(HEAD, raising=False)

    def look(*records: HeadRecord) -> estop_targets.KnownHeads:
        monkeypatch.setattr(estop_targets, "find_records", lambda *_, **__: MachineRecords(records))
        return estop_targets.known_heads(None)

    return look


def record(user: int, *endpoints: str, **more: str) -> HeadRecord:
    return HeadRecord("head", 1, 0.0, list(endpoints), user=user, path=f"/tmp/{user}-{len(endpoints)}", **more)


def endpoints_of(target: estop_targets.StopTarget) -> list[str]:
    return [endpoint for endpoint, _ in target.asked.ways]


def test_another_users_record_adds_no_address_to_an_own_head(known):
    found = known(record(OTHER, THEIRS, REAL), record(os.geteuid(), REAL))
    assert [endpoints_of(target) for target in found.targets] == [[THEIRS, REAL], [REAL]]


def test_several_records_of_one_user_are_one_head(known):
    for user in (os.geteuid(), OTHER):
        found = known(record(user, REAL), record(user, THEIRS, REAL))
        assert [set(endpoints_of(target)) for target in found.targets] == [{THEIRS, REAL}]


def test_configured_head_is_asked_at_its_address_despite_other_records(known, monkeypatch):
    monkeypatch.setenv(HEAD, "127.0.0.1:6380")
    monkeypatch.setattr(estop_targets.discovery, "security_toward", lambda *_: Security())
    found = known(record(OTHER, THEIRS, REAL))
    assert [set(endpoints_of(target)) for target in found.targets] == [{THEIRS, REAL}, {REAL}]
    assert len(known(record(os.geteuid(), REAL)).targets) == 1, "a record of this user is trusted"


def test_a_fault_is_reported_for_its_head_only():
    def broken() -> Security:
        raise ConfigError("is not a regular file", path="/home/m/k")

    asker = BlockingClient()
    heads = [
        RemoteHead([(REAL, broken)]),
        RemoteHead([("tcp://a:b", Security(True))]),
        RemoteHead([("tcp://a:\xb2", Security())]),
    ]
    try:
        for head in heads:
            asker.add(head)
        down: dict[RemoteHead, str] = {}
        while len(down) < len(heads):
            down |= {event.head: event.why for event in asker.step(pace.PATIENCE_S)[0] if isinstance(event, HeadDown)}
    finally:
        asker.close()
    assert down[heads[0]] == "/home/m/k: is not a regular file"


def test_blocking_key_file_delays_no_other_head(fake):
    reads = threading.Event()
    asker = BlockingClient()
    stuck, other = RemoteHead([(REAL, lambda: reads.wait() and Security())]), RemoteHead([(fake.endpoint, Security())])
    try:
        for head in (stuck, other):
            asker.ask(head, EStop("test", "", None, False))
            asker.add(head)
        (answer,) = next_answers(asker, 1)
        assert answer.head is other
    finally:
        asker.close()
        reads.set()


def test_flooding_head_is_read_one_message_at_a_time(fake):
    head = RemoteHead([(fake.endpoint, Security())])
    asker = BlockingClient()
    try:
        for _ in range(50):
            asker.ask(head, EStop("test", "", None, False))
        asker.add(head)
        next_answers(asker, 50, at_once=1)
    finally:
        asker.close()


def next_answers(asker: BlockingClient, count: int, at_once: int = 1000) -> list[HeadAnswered]:
    """The next *count* answers; no step may bring more than *at_once*."""
    found: list[HeadAnswered] = []
    while len(found) < count:
        events = [event for event in asker.step(pace.PATIENCE_S)[0] if isinstance(event, HeadAnswered)]
        assert len(events) <= at_once
        found += events
    return found


def test_head_that_is_restarted_before_its_answers_is_asked_again(fake):
    stopping = EStopped([RobotStop("env:0", "lab", ["Franka ip"], "n0", True, 1.5)], wait_s=pace.PATIENCE_S)
    fake.answers = [None, stopping, None, EStopped()]
    target = estop_targets.StopTarget("h:1", "head", None, RemoteHead([(fake.endpoint, Security())]))
    answers = [(target, stopping), (target, EStopped())]
    assert list(estop_targets.ask_all([target], EStop("test"), EStop("test", wait=True))) == answers
    assert [asked.wait for asked in fake.asked] == [False, False, True, True]


@pytest.mark.parametrize("second", ["it did not answer within 3 s", Failed(1, "usage", "no")])
def test_head_that_does_not_say_what_became_of_its_robot_workers_is_not_confirmed(capsys, second):
    target, report = estop_targets.StopTarget("h:1", "head", None, RemoteHead([])), estop_targets.Report(False)
    report.add(target, EStopped([RobotStop("env:0", "lab", ["Franka ip"], "n0", True, 1.5)], wait_s=3.0))
    report.add(target, second)
    assert report.end(estop_targets.KnownHeads()) == 69
    said = capsys.readouterr()
    assert said.out == (
        "stopping     h:1: 1 robot worker of 1 driver (head)\n"
        "  stopping: env:0 of job lab on n0 (Franka ip); its lease ends in 1.5 s at the latest\n"
    )
    assert "its lease ends in 1.5 s at the latest; it did not say what became of them: it " in said.err
    assert "THE EMERGENCY STOP IS NOT CONFIRMED EVERYWHERE. ROBOTS MAY STILL MOVE" in said.err


def test_head_that_is_not_there_is_tried_for_some_seconds_and_each_second_says_so(monkeypatch, tmp_path):
    said: list[str] = []
    started: list[Fake] = []

    def say(text: str) -> None:
        said.append(text)
        if not started:
            started.append(Fake(str(tmp_path)))
            started[0].start()

    monkeypatch.setattr(estop_targets, "say", say)
    monkeypatch.setattr(estop_targets, "DEADLINE_S", 3.0)
    there = estop_targets.StopTarget("h:1", "head", None, RemoteHead([(f"ipc://{tmp_path}/fake", Security())]))
    nowhere = estop_targets.StopTarget("h:2", "head", None, RemoteHead([(f"ipc://{tmp_path}/none", Security())]))
    try:
        answers = list(estop_targets.ask_all([there, nowhere], EStop("test")))
    finally:
        started[0].end()
    assert answers == [
        (there, EStopped([], [])),
        (nowhere, f"ipc://{tmp_path}/none: nobody listens there (No such file or directory), for 3 s"),
    ]
    tried = [line for line in said if line.startswith("waiting      h:2, ")]
    assert [line.partition("more: ")[2] for line in tried[:2]] == [
        f"ipc://{tmp_path}/none: nobody listens there (No such file or directory)"
    ] * 2


class Fake(threading.Thread):
    """A fake head: it answers every stop and stops no robot.

    Attributes:
        asked: the questions that it has received.
        answers: its first answers; at None it ends without an answer, and listens again.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.endpoint = f"ipc://{folder}/fake"
        self.asked: list[EStop] = []
        self.answers: list[EStopped | None] = []
        self._context = zmq.Context()
        self.listen()

    def listen(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self.endpoint)

    def run(self) -> None:
        try:
            while True:
                who, first, *big = self._socket.recv_multipart()
                for header, _ in unpack(first, big):
                    request = control_codec.decode(header)
                    self.asked.append(request.body)
                    answer = self.answers.pop(0) if self.answers else EStopped()
                    if answer is None:
                        self._socket.close(linger=0)
                        self.listen()
                    else:
                        reply = control_codec.encode(Reply(request.id, answer))
                        self._socket.send_multipart([who, pack([(reply, ())])[0]])
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def end(self) -> None:
        self._context.term()
        self.join()


@pytest.fixture
def fake() -> Iterator[Fake]:
    with tempfile.TemporaryDirectory(prefix="fake-") as folder:
        made = Fake(folder)
        made.start()
        yield made
        made.end()


# --- real processes ---


@pytest.mark.live
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have another user")
def test_another_users_fake_head_does_not_affect_the_stop_of_roots_heads(fake):
    with tempfile.TemporaryDirectory(prefix="estop-") as folder, ExitStack() as ends:
        machine = Machine(Path(folder), ends)
        _, address = machine.head()
        private = Path(folder, "m")
        private.mkdir(0o700)
        fifo = private / "k"
        os.mkfifo(fifo, 0o600)
        for path in (private, fifo):
            os.chown(path, OTHER, OTHER)
        theirs = HeadRecord("head", 1, 0.0, [fake.endpoint, f"tcp://{address}"], key=str(fifo), head_key="x" * 40)
        with open(machine.heads / f"{PREFIX}0{SUFFIX}", "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            os.fchown(file.fileno(), OTHER, OTHER)
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(msgspec.json.encode(theirs))
            file.flush()
            done = machine.estop("--json", "--reason", "fire", **{HEAD: address})
        clusters = json.loads(done.stdout)["clusters"]
        assert len(fake.asked) == 1
        assert [cluster["acknowledged"] for cluster in clusters] == [True, True]
        assert any("fire" in line for line in machine.in_force(address))
