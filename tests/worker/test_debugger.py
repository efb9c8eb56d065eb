"""The debugger of a worker: a thread waits in a breakpoint, and attachments talk to it. No process, no socket."""

from __future__ import annotations

import asyncio
import bdb
import logging
import queue
import sys
import threading
from collections.abc import Iterator

import pytest

from rlinf_actors.net.loop import IoThread
from rlinf_actors.wire.debug_values import (
    FREE,
    MAX_DEBUG_WAIT_S,
    MAX_OUTPUT,
    OVER,
    REPLACED,
    WAITS,
    DebugAnswer,
    DebugQuestion,
)
from rlinf_actors.worker import debugger
from rlinf_actors.worker.debugger import KEPT_CHARS, Debugger
from rlinf_actors.worker.worker_pdb import WorkerPdb


class Scene:
    """A worker's debugger, threads of user code, and the newest attachment that talks to it."""

    def __init__(self, io: IoThread) -> None:
        self.io = io
        self.answers: queue.SimpleQueue[DebugAnswer] = queue.SimpleQueue()
        self.debugger = Debugger("g:0", "ns", io, WorkerPdb, logging.getLogger("test"))
        self.threads: list[threading.Thread] = []
        self.results: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.number = 0
        self.begin("s")

    def run(self, function, *args) -> None:
        """Call function(stop, done, *args) on a thread of its own, which nothing of these tests is below."""
        name, given = f"user-{len(self.threads)}", (self.debugger.hook, self.results.put, *args)
        self.threads.append(threading.Thread(target=function, args=given, name=name, daemon=True))
        self.threads[-1].start()

    def begin(self, attachment: str) -> None:
        self.attachment, self.number, self.asked = (
            attachment,
            0,
            DebugQuestion("ns", "w", attachment, f"by {attachment}"),
        )

    def send(self, text: str = "", wait_s: float = MAX_DEBUG_WAIT_S, **more) -> None:
        fields = {name: more.get(name, getattr(self.asked, name)) for name in ("stop", "offset")}
        fields["interrupts"] = more.get("interrupts", False)
        self.number += bool(text) or fields["interrupts"]
        by = f"by {self.attachment}"
        question = DebugQuestion("ns", "w", self.attachment, by, self.number, text, **fields, wait_s=wait_s)
        self.io.call(self.debugger.asked, question, self.answers.put)
        self.number = self.number or 1

    def take(self) -> DebugAnswer:
        answer = self.answers.get()
        end = answer.offset + len(answer.output)
        self.asked = DebugQuestion("ns", "w", self.attachment, stop=answer.stop, offset=end if answer.stop else -1)
        return answer

    def say(self, text: str = "") -> tuple[str, DebugAnswer]:
        """Send input, and read until the debugger asks again or the breakpoint is left."""
        self.send(text)
        shown = ""
        while True:
            answer = self.take()
            shown += answer.output
            if answer.asks or answer.state == OVER:
                return shown, answer
            self.send()


@pytest.fixture
def scene() -> Iterator[Scene]:
    io = IoThread("io")
    made = Scene(io)
    yield made
    for thread in made.threads:
        thread.join(10)
    io.stop()


def add(stop, done, value):
    result = value + 1
    stop()
    result *= 10
    done(result)


class Finalized:
    """Runs code of this file on the thread that drops its last reference."""

    def __del__(self) -> None:
        self.ended = True


def add_while_garbage_is_collected(stop, done, value):
    result = value + 1
    kept = [Finalized()]
    stop(), kept.clear()  # the finalizer runs before the next line
    done(result)


def add_or_quit(stop, done, value):
    try:
        add(stop, done, value)
    except bdb.BdbQuit as error:
        done(error)


def test_one_answer_has_the_output_and_the_end_of_what_was_typed_at_once(scene, monkeypatch):
    monkeypatch.setattr(debugger, "TOGETHER_S", MAX_DEBUG_WAIT_S)
    scene.run(add, 1)
    scene.say()
    scene.send("p value + 41\nc\n")
    answer = scene.take()
    assert (answer.state, "42" in answer.output) == (OVER, True)
    assert scene.results.get() == 20


def test_variables_are_read_and_set_and_the_thread_goes_on(scene):
    scene.run(add, 1)
    shown, answer = scene.say()
    assert "test_debugger.py" in shown
    assert shown.endswith("\n(Pdb) ")
    assert (answer.state, answer.thread, answer.queued) == (WAITS, "user-0", 0)
    assert answer.place.startswith("test_debugger.py:")
    assert answer.place.endswith(" in add")
    assert scene.say("p value, result\n")[0] == "(1, 2)\n(Pdb) "
    assert scene.say("result = 5\np result\n")[0] == "(Pdb) 5\n(Pdb) "
    shown, answer = scene.say("c\n")
    assert (shown, answer.state) == ("", OVER)
    assert scene.results.get() == 50


def test_thread_stops_in_the_code_of_the_breakpoint_and_not_in_a_finalizer(scene):
    scene.run(add_while_garbage_is_collected, 1)
    _, answer = scene.say()
    assert answer.place.endswith(" in add_while_garbage_is_collected")
    assert scene.say("p result\n")[0].startswith("2\n")
    scene.say("c\n")


def test_input_that_comes_again_is_not_taken_again(scene):
    scene.run(add, 1)
    scene.say()
    scene.say("result += 1\n")
    scene.number -= 1
    scene.send("result += 1\n")
    scene.send("p result\n")
    while not (shown := scene.take().output):
        pass
    assert shown.startswith("3\n")
    scene.say("c\n")


def test_end_of_the_method_leaves_the_breakpoint(scene):
    scene.run(add, 1)
    scene.say()
    shown, answer = scene.say("n\nn\nn\nn\nn\n")
    assert shown.endswith("add() has ended\n")
    assert answer.state == OVER
    assert scene.results.get() == 20


def test_quit_raises_in_the_users_code(scene):
    scene.run(add_or_quit, 1)
    scene.say()
    assert scene.say("q\n")[1].state == OVER
    assert isinstance(scene.results.get(), bdb.BdbQuit)


def test_threads_in_breakpoints_wait_for_their_turn(scene):
    for value in (1, 2):
        scene.run(add, value)
    answer = scene.say()[1]
    seen = {answer.thread}
    while not answer.queued:  # until the second thread is there
        answer = scene.say("p 0\n")[1]
    answer = scene.say("c\n")[1]
    assert (answer.state, answer.queued) == (OVER, 1)
    scene.asked = DebugQuestion("ns", "w", "s")
    seen.add(scene.say()[1].thread)
    assert seen == {"user-0", "user-1"}
    scene.say("c\n")
    assert sorted([scene.results.get(), scene.results.get()]) == [20, 30]


def test_command_that_runs_is_interrupted_and_the_users_code_is_not(scene):
    scene.run(add, 1)
    scene.say()
    scene.send("print('on', flush=True); exec('while 1: pass')\n")
    while "on" not in scene.take().output:
        scene.send()
    scene.begin("later")
    scene.send()
    answer = scene.take()
    assert (answer.asks, answer.runs_s > 0) == (False, True)
    assert answer.output.endswith("-> result *= 10\n"), "the line without a prompt, and nothing of what was said before"
    scene.send(interrupts=True)
    shown = ""
    while not (answer := scene.take()).asks:
        shown += answer.output
        scene.send()
    assert (shown + answer.output, answer.runs_s) == ("*** KeyboardInterrupt\n(Pdb) ", 0.0)
    scene.send(interrupts=True, wait_s=0.0)  # at the prompt it is for no command
    scene.take()
    assert scene.say("p 1\n")[0] == "1\n(Pdb) "
    assert scene.say("c\n")[1].state == OVER
    assert scene.results.get() == 20


def test_newest_attachment_takes_over_and_the_one_before_is_told(scene):
    scene.run(add, 1)
    scene.say()
    scene.say("p 'earlier'\n")
    scene.send()
    scene.begin("later")
    scene.send()
    answers = [scene.take(), scene.take()]
    assert [(one.state, one.by) for one in answers if one.state == REPLACED] == [(REPLACED, "by later")]
    (taken,) = [one for one in answers if one.state == WAITS]
    assert taken.output.endswith("-> result *= 10\n(Pdb) "), "it begins with the line where the thread waits"
    assert "earlier" not in taken.output
    scene.attachment = "s"
    scene.send("c\n")
    assert scene.take().state == REPLACED
    scene.attachment = "later"
    assert scene.say("c\n")[1].state == OVER


def test_question_without_a_breakpoint_waits_and_is_answered_by_the_next_one(scene, caplog):
    caplog.set_level(logging.INFO, "test")
    scene.send(wait_s=0.0)
    assert scene.take().state == FREE
    assert "attaches" not in caplog.text
    scene.send()
    scene.run(add, 1)
    assert scene.take().state == WAITS
    scene.say("c\n")
    assert caplog.messages.count("by s attaches to g:0") == 1


def test_flood_of_output_is_bounded_and_says_what_is_left_out(scene):
    scene.run(add, 1)
    scene.say()
    scene.send(f"print('{'x' * 99}\\n' * {KEPT_CHARS // 50})\n")
    scene.send()
    answers = []
    while not answers or not answers[-1].asks:
        answers.append(scene.take())
        assert len(answers[-1].output) <= MAX_OUTPUT
        scene.send()
    assert "".join(answer.output for answer in answers).endswith("x\n\n(Pdb) ")
    scene.say("c\n")


def test_surrogates_and_long_lines_can_be_sent(scene):
    scene.run(add, 1)
    scene.say()
    assert "?" in scene.say("print('\\udc80')\n")[0]
    scene.say("c\n")


def test_pythonbreakpoint_of_the_user_is_honoured(scene, monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    scene.run(add, 1)
    assert scene.results.get() == 20
    assert scene.debugger.where() == ("", 0)


def test_io_thread_never_stops(scene, caplog):
    scene.io.submit(_call(scene.debugger.hook)).result()
    assert "breakpoint() is ignored on the I/O thread" in caplog.text


async def _call(function) -> None:
    function()


def test_robots_are_named_in_the_log(scene, caplog):
    scene.debugger._robots = ("Franka 10.0.1.1",)
    scene.run(add, 1)
    scene.say()
    assert "g:0 holds Franka 10.0.1.1 and waits in a breakpoint" in caplog.text
    scene.say("c\n")


async def add_later(stop, done, value):
    stop()
    await asyncio.sleep(0)
    done(value + 1)


def test_coroutine_is_stepped_over_its_awaits(scene):
    scene.run(lambda stop, done: asyncio.run(add_later(stop, done, 1)))
    scene.say()
    shown, answer = scene.say("n\nn\nn\nn\nn\n")
    assert "-> done(value + 1)" in shown
    assert shown.endswith("add_later() has ended\n")
    assert answer.state == OVER
    assert scene.results.get() == 2


def test_hook_is_called_by_breakpoint(scene, monkeypatch):
    monkeypatch.setattr(sys, "breakpointhook", scene.debugger.hook)

    def stop(_, done):
        breakpoint(header="look here")
        done(3)

    scene.run(stop)
    shown, answer = scene.say()
    assert shown.startswith("look here\n")
    assert answer.place.endswith(" in stop")
    scene.say("c\n")
    assert scene.results.get() == 3
