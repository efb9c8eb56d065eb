"""Lines about waits: when they are due, what they say, and that nothing of them stays in a terminal."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from rlinf_actors.errors import ClusterTimeoutError
from rlinf_actors.last_line import last_line
from rlinf_actors.runtime import progress
from rlinf_actors.runtime.future import Promise
from rlinf_actors.runtime.progress import Facts, Lines, WaitLine, doing, nodes_facts, showing, showing_blocked
from rlinf_actors.wire.stack_values import Stack, StackFrame, Wait, WorkerStacks
from rlinf_actors.wire.values import NodeReport, NodeState

SITE = "/usr/lib/python3/site-packages"


def due(on_terminal: bool, until_s: float) -> list[float]:
    lines, found = Lines(on_terminal), []
    while lines.next_s <= until_s:
        found.append(lines.next_s)
        lines.line(Facts("2 of 3"), lines.next_s)
    return found


def test_a_terminal_shows_a_wait_each_second_and_others_print_rare_lines():
    assert due(True, 5.0) == [2.0, 3.0, 4.0, 5.0]
    assert due(False, 29.0) == []
    assert due(False, 300.0) == [30.0, 60.0, 120.0, 240.0]


def test_what_is_missing_is_said_after_30_s():
    facts = Facts("2 of 3 nodes", "missing rank 2")
    assert Lines(True).line(facts, 29.0) == "2 of 3 nodes, 29 s"
    assert Lines(True).line(facts, 31.0) == "2 of 3 nodes, 31 s; missing rank 2"


def node(rank: int, state: str = "ready", seen_s: float = 0.0) -> NodeState:
    report = NodeReport(f"id-{rank}", f"n{rank}", "10.0.0.1", "", 8, 1 << 34, "3.11", "/p")
    return NodeState(report, "i", rank, state, seen_s)


def test_missing_nodes_are_named_with_when_they_were_seen():
    assert nodes_facts([node(0), node(1), node(2, "lost", 14.0)], 3) == Facts(
        "waiting for nodes: 2 of 3 (n0, n1)", "not ready: rank 2 (n2) is lost, last seen 14 s ago"
    )
    up = "not ready: rank 1 (n1) is lost, last seen 14 s ago; up with other ranks: n2"
    assert nodes_facts([node(0), node(1, "lost", 14.0), node(2)], 2) == Facts("waiting for nodes: 1 of 2 (n0)", up)
    new = replace(node(2), rank=-1)  # its rank will be 2: a node that is away keeps rank 1
    assert nodes_facts([node(0), node(1, "lost", 14.0), new], 2) == Facts("waiting for nodes: 1 of 2 (n0)", up)
    assert nodes_facts([node(0), new], 2) == Facts("waiting for nodes: 2 of 2 (n0, n2)")
    assert nodes_facts([node(0)], 2) == Facts("waiting for nodes: 1 of 2 (n0)", "not ready: rank 1 was never seen")
    assert nodes_facts([node(0), node(1, "draining", 0.0)], 3).missing == (
        "not ready: rank 1 (n1) is draining, last seen 0 s ago; rank 2 was never seen"
    )
    assert nodes_facts([], 9).missing == (
        "not ready: rank 0 was never seen; rank 1 was never seen; rank 2 was never seen; rank 3 was never seen"
        " and 5 more"
    )


def stacks(*frames: tuple[str, str], **more) -> WorkerStacks:
    return WorkerStacks("w", stacks=[Stack("main", [StackFrame(file, 7, name) for file, name in frames])], **more)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (stacks(("/w/main.py", "run"), ("/home/train.py", "<module>"), (f"{SITE}/torch/__init__.py", "<module>"),
                (f"{SITE}/numpy/__init__.py", "<module>")), "imports torch"),
        (stacks(("/home/train.py", "<module>"), ("/home/slow.py", "<module>"), ("/home/slow.py", "f")), "imports slow"),
        (stacks((f"{SITE}/six.py", "<module>")), "imports six"),
        (stacks(("<string>", "<module>"), (f"{SITE}/rlinf_actors/worker/main.py", "_construct")), "starts"),
        (stacks(("/home/train.py", "__init__")), "is in __init__(), train.py:7"),
        (stacks(("/home/train.py", "__init__"), waits=[Wait("get() of a", 1.0)]), "waits in get() of a"),
        (WorkerStacks("w", fault="it is silent"), "does not answer: it is silent"),
        (WorkerStacks("w"), "starts"),
    ],
)  # fmt: skip
def test_a_worker_that_starts_is_described_by_its_main_thread(found, text):
    assert doing(found) == text


@pytest.fixture
def shown(monkeypatch):
    """stderr as a terminal or a pipe: returns what was written so far."""
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    opened = []

    def open_(terminal: bool):
        reader, writer = os.openpty() if terminal else os.pipe()
        stream = os.fdopen(writer, "w")
        opened.extend([stream, os.fdopen(reader, "rb")])
        monkeypatch.setattr(sys, "stderr", stream)
        return lambda: os.read(reader, 65536).decode()

    yield open_
    monkeypatch.undo()
    for stream in opened:
        stream.close()


def exactly(read: Callable[[], str], wanted: str) -> str:
    """Read as much as *wanted* has: a terminal hands over its text in pieces."""
    text = ""
    while len(text) < len(wanted):
        text += read()
    return text


async def test_a_terminal_is_clean_after_the_wait_and_faults_of_a_look_are_shown(shown):
    read = shown(True)
    looks = asyncio.Queue()

    async def look(missing: bool) -> Facts | None:
        return await looks.get()

    async with showing(look):
        looks.put_nowait(Facts("1 of 2\x1b[2J"))
        text = ""
        while "s" not in text:
            text += await asyncio.to_thread(read)
        assert text == "\r\x1b[2K1 of 2\\x1b[2J, 0 s"
    assert read() == "\r\x1b[2K"


def test_a_line_is_rewritten_without_escape_sequences_if_those_are_not_wanted(shown, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    read = shown(True)
    said, wait = [], object()
    last_line.begin(wait)
    for text in ("0 of 2 nodes", "1 of 2"):
        last_line.show(wait, text, "")
        said.append(read())
    last_line.end(wait)
    assert [*said, read()] == ["\r0 of 2 nodes", f"\r{' ' * 12}\r1 of 2", f"\r{' ' * 6}\r"]


async def test_a_failed_look_is_said_and_asked_again(shown, monkeypatch):
    monkeypatch.setattr(progress, "MISSING_S", 0.0)
    read = shown(True)
    outcomes = iter([Facts("1 of 2"), ClusterTimeoutError("the head is silent")])

    async def look(missing: bool) -> Facts | None:
        found = next(outcomes, None)
        if isinstance(found, Exception):
            raise found
        return found

    async with showing(look):
        text = ""
        while "silent" not in text or not text.endswith("\r\x1b[2K"):
            text += await asyncio.to_thread(read)
        assert "1 of 2" in text


async def test_a_pipe_gets_whole_lines_without_escape_sequences(shown, monkeypatch):
    monkeypatch.setattr(progress, "MISSING_S", 0.0)
    read = shown(False)
    seen = asyncio.Event()

    async def look(missing: bool) -> Facts | None:
        if seen.is_set():
            await asyncio.get_running_loop().create_future()
        seen.set()
        return Facts("1 of 2", "missing rank 1")

    async with showing(look):
        text = await asyncio.to_thread(read)
    assert text == "[rlinf-actors] 1 of 2, 0 s; missing rank 1\n"


async def test_a_setting_switches_it_off(shown, monkeypatch):
    monkeypatch.setenv("RLINF_ACTORS_PROGRESS", "0")
    shown(True)
    async with showing(lambda missing: pytest.fail("nothing is looked at")):
        await asyncio.sleep(0)


def test_a_thread_that_blocks_shows_its_wait_too(shown, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 1000.0)
    read, looked = shown(True), threading.Event()

    def look() -> Facts:
        looked.set()
        return Facts("stopping a unit")

    first = "\r\x1b[2Kstopping a unit, 0 s"
    with showing_blocked(look):
        looked.wait()
        assert exactly(read, first) == first
    assert exactly(read, "\r\x1b[2K") == "\r\x1b[2K"


class Notebook(io.StringIO):
    """stderr of a notebook, which is no terminal and shows a carriage return as terminals do."""

    __module__ = "ipykernel.iostream"


def test_a_notebook_has_one_line_which_ends_with_the_wait(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Notebook())
    with WaitLine("[rlinf-actors] ") as line:
        assert line.next_s == progress.FIRST_S
        line.show(Facts("2 of 3 nodes"), 2.0)
        line.show(Facts("3 of 3"), 3.0)
    assert sys.stderr.getvalue() == "\r2 of 3 nodes, 2 s\r3 of 3, 3 s      \r           \r"


class Late(Promise[None]):
    """Ends as soon as a thread waits for it."""

    def _on_done(self, callback: Callable[[], object]) -> None:
        super()._on_done(callback)
        self.resolve(None)


def test_the_line_is_removed_before_code_that_has_waited_prints(shown):
    read = shown(True)
    with WaitLine() as line:
        line.show(Facts("1 of 2 hosts"), 2.0)
        Late("a put").wait()
        wanted = "\r\x1b[2K1 of 2 hosts, 2 s\r\x1b[2K"
        assert exactly(read, wanted) == wanted
