"""What agentd believes of its templates: a template of another user may be run by that user's code."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter

import msgspec
import pace
import pytest
from workers_kit import children, order, spec

from agentd import adoption, templates
from agentd.adoption import Survivors, end_template
from agentd.health import HealthTable
from agentd.keeper_client import KeeperClient
from agentd.launch_plan import TemplateKey
from agentd.logs import MAX_LINE, WINDOW, LogForwarder
from agentd.run_dir import OrderLedger
from agentd.templates import SurvivingTemplate, TemplateProcess, TemplateRecord
from agentd.users import User
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.wire.agent_messages import LogLines, OutputLost, StartWorkers
from rlinf_actors.wire.endings import REASON_CHARS
from rlinf_actors.wire.template_protocol import Pong
from rlinf_actors.wire.values import Endpoint, ExitReport

OTHER = User("lab-x", 61999, 61999, (), "/nowhere", "/bin/sh", "/nowhere/run", "/nowhere/log")
SLOW = {"PATH": ":".join(f"/nowhere/{number}" for number in range(4000))}


@pytest.fixture
async def hostile(tmp_path):
    """A template, agentd's connection to it, the template's end, and all packets that agentd took."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    taken, ended, loop = [], asyncio.Event(), asyncio.get_running_loop()
    waits = [sys.executable, "-c", "input()"]
    with theirs, subprocess.Popen(waits, stdin=subprocess.PIPE) as process:  # noqa: ASYNC220
        template = TemplateProcess(
            loop, KeeperClient(loop, tmp_path, False), None, ours, str(tmp_path / "t"),
            (process.pid, os.pidfd_open(process.pid)), lambda _, packet: taken.append(packet), lambda _: ended.set(),
        )  # fmt: skip
        yield template, theirs, taken, ended
        template.kill()
        await ended.wait()


async def test_malformed_packet_ends_its_template_and_not_agentd(hostile):
    template, theirs, taken, ended = hostile
    theirs.send(b"\xc1 no packet")
    theirs.send(packets.encode(packets.LogsGrew(["w"])))
    await asyncio.wait_for(ended.wait(), pace.PATIENCE_S)
    assert "its template was killed: not a packet for agentd" in template.failure
    assert taken == [], "what comes after it is not read"


@pytest.mark.parametrize(
    "packet",
    [
        packets.TemplateReady(1, "3", True, paths=["/\0"]),
        packets.Inventory(0.0, paths=["/\0"]),
        packets.SurvivingWorker("w", out_path="/\0"),
        packets.SurvivingWorker("w", err_path="\n\0"),
        packets.SurvivingWorker("w", out_read=(2**64 - 1, 1)),
        packets.SurvivingWorker("w", err_read=(0, -1)),
        packets.WorkerUp("w", Endpoint("e"), 65536, 0),
    ],
)
def test_what_no_system_call_takes_is_no_packet(packet):
    """It would raise in agentd, which an exception in a callback ends."""
    with pytest.raises(RemoteWireError, match="not a packet for agentd"):
        packets.decode_to_agent(packets.encode(packet))


async def test_packets_of_what_outlives_a_template_do_not_hold_agentd(hostile):
    """A child of the template has its socket, and always sends one packet more."""
    template, theirs, taken, ended = hostile
    packet = packets.encode(packets.LogsGrew(["w"]))

    def answer(_, one):
        taken.append(one)
        theirs.send(packet)

    template._on_packet = answer
    os.kill(template.pid, signal.SIGKILL)
    os.waitid(os.P_PID, template.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - before the loop hears of it
    theirs.send(packet)
    await asyncio.wait_for(ended.wait(), pace.PATIENCE_S)
    assert 0 < len(taken) <= templates._LAST + 100 * templates._TURN


async def test_template_that_never_reads_is_ended(hostile, monkeypatch):
    monkeypatch.setattr(templates, "_MOST_QUEUED", 100)
    template, _, _, ended = hostile
    while not template.failure:
        template.send(packets.Renew(1.0))
    await asyncio.wait_for(ended.wait(), pace.PATIENCE_S)
    assert "does not read" in template.failure


def test_last_words_of_a_template_are_its_last(tmp_path):
    (tmp_path / "t.err").write_bytes(b"x" * (1 << 20) + b"\nthe last line\n")
    assert len(found := templates._end_of(str(tmp_path / "t.err"))) == templates._STDERR_BYTES
    assert found.endswith(b"the last line\n")


@pytest.mark.live
async def test_template_has_a_say_about_its_own_workers_only(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one, other = spec(group="one"), spec(group="other", env={"LD_OTHER": "1"})
        kids.start(order([one]))
        kids.start(order([other]))
        await reports.up(one, other)
        liar, asked = kids._workers[one.id].template, []
        assert liar is not kids._workers[other.id].template
        before = len(reports.order)
        kids._devices.handle = lambda *given: asked.append(given)
        for packet in (
            packets.Exited(other.id, ExitReport("exited", 0)),
            packets.WorkerUp(other.id, Endpoint("liar"), 1, 0),
            packets.Forked(other.id, os.getpid()),
            packets.LogsLost(other.id, "all of it"),
            packets.LogsGrew([other.id]),
            packets.LockDevices(other.id, 1),
            packets.WorkerUp(one.id, Endpoint("again"), 1, 0),
        ):
            kids._on_packet(liar, packet)
        assert (reports.order[before:], asked) == ([], [])
        assert kids._workers[other.id].pid not in (0, os.getpid())
        kids.stop([other.id], 5.0)
        assert (await reports.gone(other)).kind == "stopped"


@pytest.mark.live
async def test_long_reason_of_a_worker_ends_neither_its_template_nor_agentd(tmp_path):
    """Their messages have bounds, and a message that breaks one is not read."""
    said = "t.encode(t.StartFailed(spec.id, 'x' * 60_000))"
    first = f"from rlinf_actors.wire import template_protocol as t; sock.send({said}); os._exit(1)"
    async with children(tmp_path) as (kids, reports):
        one, other = spec(first=first), spec()
        kids.start(order([one, other]))
        await reports.up(other)
        exit = await reports.gone(one)
        assert (exit.kind, exit.reason) == ("start_failed", "x" * REASON_CHARS)
        assert kids._workers[other.id].template.failure == ""


@pytest.mark.live
async def test_worker_cannot_be_a_process_of_another_user(tmp_path, caplog):
    """agentd would kill it, with rights that the template's user lacks."""
    async with children(tmp_path) as (kids, reports):
        one = spec()
        kids.start(order([one]))
        await reports.up(one)
        worker = kids._workers[one.id]
        own, rules = worker.site, msgspec.structs.replace(worker.site.rules, user=OTHER)
        worker.site = msgspec.structs.replace(own, rules=rules)
        kids._on_packet(worker.template, packets.Forked(one.id, os.getpid()))
        assert worker.pid != os.getpid()
        worker.site = own
        assert (await reports.gone(one)).kind == "signalled"
    assert f"worker {one.id} is process {os.getpid()}, which is another user's" in caplog.text


def test_answers_for_other_templates_workers_do_not_count():
    table = HealthTable()
    table.worker_up("a", 1, 0.0)
    table.answered(2, [Pong("a", "method", 1.0)], 5.0)
    assert table.workers["a"].answered_at == 0.0
    table.answered(1, [Pong("a", "method", 1.0)], 5.0)
    assert table.workers["a"].answered_at == 5.0


@pytest.mark.live
async def test_workers_of_a_large_order_start_in_turns_of_the_loop(tmp_path):
    """The lookup of their interpreter takes milliseconds each, because their driver says where to look."""
    async with children(tmp_path) as (kids, reports):
        many = [spec(rank, env=SLOW, interpreter="nothing") for rank in range(40)]
        kids.start(order(many[:20]))
        kids.start(order(many[20:]))
        turns = 0
        while len(reports.exits) < 30:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 10, "the loop went on with other work"
        last = [one for one in many if one.id not in reports.exits]
        kids.stop([one.id for one in last], 0.0, "enough")
        assert "stopped" in {(await reports.gone(one)).kind for one in last}
        ranks = [many.index(next(one for one in many if one.id == id)) for id in list(reports.exits)[:20]]
        assert max(ranks) >= 20, "orders take turns"


@pytest.mark.live
async def test_end_of_agentd_ends_the_starts_that_wait(tmp_path):
    async with children(tmp_path) as (kids, reports):
        many = [spec(rank, env=SLOW, interpreter="nothing") for rank in range(20)]
        kids.start(order(many))
        waited = [one.id for one in many if one.id in kids._starts.ids()]
        assert waited
    assert len(reports.exits) == len(many)
    assert {reports.exits[id].kind for id in waited} == {"stopped"}


async def test_lines_that_replace_one_another_do_not_hold_agentd(tmp_path):
    """They take no credit, so a worker may have written any number of them before its end."""
    read, loop, ended = [], asyncio.get_running_loop(), asyncio.Event()

    def on_read(id, out, err, to_end):
        read.append(out[0])
        if to_end:
            ended.set()

    logs = LogForwarder(loop, "n0", lambda lines: None, on_read)
    out, err = tmp_path / "out", tmp_path / "err"
    for path in (out, err):
        path.touch()
    logs.add("w", "g:0", "ns", str(out), str(err))
    out.write_bytes(b"%99d\r" % 1 * (4 * WINDOW // 100))
    logs.grew(["w"])
    logs.finish("w")
    assert read[-1] <= 2 * WINDOW + 4 * MAX_LINE
    assert not ended.is_set()
    await asyncio.wait_for(ended.wait(), pace.PATIENCE_S)
    assert read[-1] == out.stat().st_size
    logs.close()


def test_notes_about_a_workers_output_are_limited(tmp_path, caplog):
    reported, loop = [], asyncio.new_event_loop()
    logs = LogForwarder(loop, "n0", reported.append, lambda *_: None)
    logs.add("w", "g:0", "ns", str(tmp_path / "out"), str(tmp_path / "err"))
    for number in range(1000):
        logs.lost("w", f"fault {number}")
    assert Counter(type(one) for one in reported) == {LogLines: 100, OutputLost: 100}
    loop.close()


# --- the next agentd ---


class Mapping:
    """Users, with a user for each driver."""

    def of_driver(self, driver):
        if not driver:
            raise ValueError("no user")
        return msgspec.structs.replace(OTHER, name=driver)


@pytest.fixture
def survivors(tmp_path):
    """Two workers of two users, in the head's orders."""
    (tmp_path / "l").mkdir()
    written = OrderLedger(tmp_path / "l")
    known = {}
    for name in ("a", "b"):
        one = spec()
        known[name] = one.id
        written.write(StartWorkers([one], driver=name))
    ledger = OrderLedger(tmp_path / "l")
    return Survivors(ledger, known=ledger.read(), users=Mapping()), known


async def test_processes_are_not_another_users_worker_by_their_environment(survivors, monkeypatch):
    found, ids = survivors
    below = {ids["a"]: {101: 1}, ids["b"]: {102: 1}, "": {103: 1}}
    monkeypatch.setattr(adoption, "processes_below", lambda pid: below)
    with subprocess.Popen(["sleep", "1000"]) as template:  # noqa: ASYNC220
        pidfd = os.pidfd_open(template.pid)
        await end_template(template.pid, pidfd, "why", False, found, "a")
        os.close(pidfd)
    assert found.lost == {ids["a"]: "why"}
    assert found.processes == {ids["a"]: {101: 1}, "": {102: 1, 103: 1}}


def test_worker_is_adopted_from_a_template_of_its_own_user_only(survivors):
    found, ids = survivors
    assert found.may_be_of(ids["a"], "a")
    assert not found.may_be_of(ids["a"], "b")
    assert found.may_be_of("of no order", "b"), "it is ended as a stray"


async def test_template_that_lists_workers_for_ever_is_not_adopted(monkeypatch):
    monkeypatch.setattr(adoption, "MAX_WORKERS", 50)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                theirs.send(packets.encode(packets.SurvivingWorker("w")))
        with pytest.raises(RemoteWireError, match="more than 50 workers"):
            await adoption._receive_inventory(ours)


@pytest.mark.parametrize(
    ("said", "since"),
    [
        ({}, 0.0),
        ({"a": 7.0}, 7.0),
        ({"a": 1.0, "": 7.0}, 7.0),
        ({"a": 1.0, "b": 0.0}, 0.0),
    ],
    ids=["none", "one", "a liar", "unknown"],
)
def test_no_user_says_that_agentd_ended_long_ago(said, since):
    """The workers of all users would be ended, as if the head had been silent for a lease."""
    found = [
        SurvivingTemplate(
            TemplateRecord(1, 1, "", 1, TemplateKey("python", (), user=user)), -1, None, "", [object()],
            packets.Inventory(at),
        )
        for user, at in said.items()
    ]  # fmt: skip
    assert adoption._since(found) == since
