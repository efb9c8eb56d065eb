"""`rlinf-actors events` against a real head in a thread of this process, without nodes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import datetime

import pace
import pytest

from rlinf_actors.cli import app
from rlinf_actors.cli.events_command import event_line, last_time
from rlinf_actors.cluster.event_stream import EventCursor
from rlinf_actors.errors import UsageError
from rlinf_actors.head.server import HeadServer
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.wire.client_messages import Events
from rlinf_actors.wire.event_values import ClusterEvent
from rlinf_actors.wire.values import ExitReport


@pytest.fixture
def head(tmp_path, monkeypatch) -> Iterator[str]:
    """A head with an emergency stop."""
    loop, up = asyncio.new_event_loop(), threading.Event()
    endpoint = f"ipc://{tmp_path}/head"

    async def serve() -> tuple[ZmqNetwork, HeadServer]:
        network = ZmqNetwork(loop)
        made = HeadServer(network)
        made.start([endpoint])
        made._coordinator.jobs.token("lab")  # opens the job
        up.set()
        return network, made

    async def end(network: ZmqNetwork, made: HeadServer) -> None:
        made.close()
        network.close()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    serving = asyncio.run_coroutine_threadsafe(serve(), loop)
    assert up.wait(pace.PATIENCE_S)
    monkeypatch.setenv("RLINF_HEAD", endpoint)
    assert app.run(["estop", "--reason", "smoke", "--job", "lab"]) == 0
    yield endpoint
    asyncio.run_coroutine_threadsafe(end(*serving.result(pace.PATIENCE_S)), loop).result(pace.PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(pace.PATIENCE_S)
    loop.close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    capsys.readouterr()
    code = app.run(["events", *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_each_event_is_one_line(head, capsys):
    code, lines, _ = run(capsys)
    assert code == 0
    assert [line.split()[2:4] for line in lines] == [["1", "head_started"], ["2", "estop"]]
    assert lines[1].endswith(": smoke (job 'lab')")


def test_json_has_stable_keys(head, capsys):
    _, lines, _ = run(capsys, "--json")
    event = json.loads(lines[1])
    assert list(event) == [
        "seq", "at", "kind", "text", "node", "node_id", "namespace", "group", "rank", "worker_id", "pid", "exit",
    ]  # fmt: skip
    assert (event["seq"], event["kind"], event["namespace"], event["rank"], event["exit"]) == (
        2, "estop", "lab", None, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["--since", "1"], ["estop"]),
        (["--since", "2"], []),
        (["--since", "10m"], ["head_started", "estop"]),
        (["--since", "2020-01-01T00:00Z"], ["head_started", "estop"]),
        (["--since", "2999-01-01 00:00"], []),
        (["--since", "2999-01-01"], []),
        (["--since", "0:00"], ["head_started", "estop"]),
        (["--node", "n0"], []),
        (["--job", "other"], ["head_started"]),
        (["--kind", "head_started"], ["head_started"]),
        (["--namespace", "other"], ["head_started"]),  # the earlier name of --job
        (["--job", "lab"], ["head_started", "estop"]),
        (["--group", "g"], []),
        (["-n", "1"], ["estop"]),
        (["-n", "5"], ["head_started", "estop"]),
        (["-n", "0"], []),
        (["--last", "1", "--kind", "head_started"], ["head_started"]),
        (["-n", "1", "--since", "2"], []),
    ],
)
def test_filters_are_sent_to_the_head(head, capsys, arguments, seen):
    code, lines, err = run(capsys, "--json", *arguments)
    assert (code, [json.loads(line)["kind"] for line in lines]) == (0, seen)
    assert err == ("" if seen or arguments == ["-n", "0"] else "no event matches these options\n")


def test_the_last_events_are_the_last_of_all_answers(head, capsys, monkeypatch):
    monkeypatch.setattr("rlinf_actors.head.event_log.ANSWER_EVENTS", 1)
    code, lines, _ = run(capsys, "-n", "1")
    assert (code, [line.split()[3] for line in lines]) == (0, ["estop"])


@pytest.mark.parametrize(
    "arguments",
    [["--since", "yesterday"], ["--since", "25:00"], ["--kind", "worker_exploded"], ["-n", "-1"], ["-n", "few"]],
)
def test_a_wrong_option_is_a_usage_error(head, capsys, arguments):
    code, lines, err = run(capsys, *arguments)
    assert (code, lines) == (64, [])
    assert arguments[1] in err


def test_a_time_of_the_day_is_the_last_such_time():
    now = datetime(2026, 5, 17, 14, 30, 20)
    assert last_time("14:30", now) == datetime(2026, 5, 17, 14, 30)
    assert last_time("14:31", now) == datetime(2026, 5, 16, 14, 31)
    assert last_time("0:00", now) == datetime(2026, 5, 17)


def test_death_of_a_worker_is_followed_by_its_last_lines():
    event = ClusterEvent(3, 0.0, "worker_died", "worker g:0 died", exit=ExitReport("exited", 1, stderr_tail=["a", "b"]))
    assert event_line(event).splitlines()[1:] == ["    a", "    b"]


# --- the cursor ---


def event(seq: int, **fields: object) -> ClusterEvent:
    return ClusterEvent(seq, 1.0, **{"kind": "worker_died", "text": f"e{seq}", **fields})


def test_a_cursor_continues_after_the_last_event():
    cursor = EventCursor("ns", 3)
    asked = cursor.request(wait=True)
    assert (asked.since, asked.log, asked.namespace, asked.wait_s > 0) == (3, "", "ns", True)
    assert [one.seq for one in cursor.take(Events("log", 1.0, [event(4), event(6)], 7))] == [4, 6]
    asked = cursor.request(wait=False)
    assert (asked.since, asked.log, asked.wait_s) == (7, "log", 0.0)


def test_cursor_from_now_first_requests_the_current_position():
    cursor = EventCursor("ns", None)
    assert (cursor.request(wait=True).since, cursor.request(wait=True).wait_s) == (-1, 0.0)
    assert cursor.take(Events("log", 1.0, [], 9)) == []
    assert (cursor.request(wait=True).since, cursor.request(wait=True).wait_s > 0) == (9, True)


def test_dropped_events_are_shown_as_one_event():
    cursor = EventCursor()
    gap, kept = cursor.take(Events("log", 2.0, [event(8)], 8, missing=7))
    assert (gap.seq, gap.kind, gap.text, kept.seq) == (7, "events_missing", "7 older events are not kept any more", 8)


def test_filter_passes_only_named_events_and_gaps():
    cursor = EventCursor(kinds=["worker_died"], group="g")
    answer = Events(
        "log", 2.0, [event(8, group="g"), event(9), event(10, group="g", kind="group_ended")], 10, missing=7
    )
    assert [one.seq for one in cursor.take(answer)] == [8]


def test_unknown_kind_of_event_is_refused():
    with pytest.raises(UsageError, match="worker_exploded"):
        EventCursor(kinds=["worker_died", "worker_exploded"])
