"""Stacks from outside of a worker: by a signal, by py-spy, and why there are none."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from types import SimpleNamespace

import pace
import pytest

from rlinf_actors import procfs
from rlinf_actors.template import outside_stacks
from rlinf_actors.template.outside_stacks import OutsideStacks, find_py_spy, handles, why_not
from rlinf_actors.template.stack_texts import of_faulthandler, of_py_spy, shown
from rlinf_actors.wire.stack_values import MAX_FRAMES, PY_SPY, SIGNAL, STACK_BYTES, WorkerStacks
from rlinf_actors.wire.template_protocol import AllowTracer, TracerAllowed, WorkerUp, encode
from rlinf_actors.wire.values import Endpoint
from rlinf_actors.wire.worker_questions import AskWorker, ShowStacks, WorkerAnswered

HOLDS_THE_LOCK = """
import ctypes, sys
from rlinf_actors.worker.outside_stacks import register

def method_of_the_user():
    print(register(), flush=True)
    while True:  # a signal ends it
        ctypes.PyDLL(None).pause()  # C code that does not release the interpreter's lock

method_of_the_user()
"""
DUMP = """\
Thread 0x00007f1 (most recent call first):
  File "/u/a.py", line 3 in wait
  File "/u/a.py", line 9 in run

Current thread 0x00007f0 [MainThread] (most recent call first):
  File "/u/train.py", line 12 in step
  File "<string>", line ??? in <module>
"""


# --- texts ---


def test_output_of_faulthandler_becomes_stacks_with_the_oldest_thread_first():
    main, other = of_faulthandler(DUMP)
    assert (main.name, [(one.file, one.line, one.function) for one in main.frames]) == (
        "MainThread", [("<string>", 0, "<module>"), ("/u/train.py", 12, "step")],
    )  # fmt: skip
    assert (other.name, [one.function for one in other.frames]) == ("0x00007f1", ["run", "wait"])
    assert of_faulthandler("") == of_faulthandler("no stack\x00\n") == []


def test_output_of_py_spy_becomes_stacks_with_the_main_thread_first():
    frame = {"name": "step", "filename": "/u/a.py", "module": None, "line": 3}
    native = {"name": "pause", "filename": "", "module": "libc.so.6", "line": 0}
    threads = [
        {"pid": 7, "os_thread_id": 9, "thread_name": "io", "owns_gil": True, "frames": []},
        {"pid": 7, "os_thread_id": 7, "thread_name": None, "owns_gil": False, "frames": [native, frame]},
    ]
    main, other = of_py_spy(json.dumps(threads))
    assert (main.name, other.name) == ("7", "io (holds the GIL)")
    assert [(one.file, one.function) for one in main.frames] == [("/u/a.py", "step"), ("libc.so.6", "pause")]
    assert of_py_spy("Error: no") == []


def test_an_answer_fits_into_a_packet_whatever_the_stacks_are():
    deep = "\n".join([f'  File "/{"ä" * 500}.py", line 1 in {"f" * 500}'] * 500)
    stacks = of_faulthandler("\n".join(f"Thread 0x{n} (most recent call first):\n{deep}" for n in range(40)))
    assert {len(stack.frames) for stack in stacks} == {MAX_FRAMES}
    answer = shown("w", SIGNAL, stacks)
    assert answer.cut == 40 - len(answer.stacks) > 0
    assert len(encode(WorkerAnswered("w", 1, answer))) < STACK_BYTES * 1.3


@pytest.mark.parametrize(
    ("scope", "status", "advice"),
    [
        (1, "", "RLINF_ACTORS_PTRACE=1"),
        (2, "", "which is for root"),
        (3, "", "until the machine boots again"),
        (0, "Name:\tx\nSeccomp:\t2\n", "--cap-add SYS_PTRACE"),
        (0, "", "sudo py-spy dump --pid 7"),
    ],
)
def test_whoever_may_not_trace_is_told_what_to_do(scope, status, advice):
    assert advice in why_not("Error: Permission Denied: Try again\n", 7, scope, status)
    backtrace = "\nStack backtrace:\n   0: anyhow::error\n"
    assert (
        why_not(f"Error: Failed to find python{backtrace}", 7, scope, status) == "py-spy: Error: Failed to find python"
    )


# --- real processes ---


class Scene:
    """A template's loop, with a process that stands for a worker whose interpreter's lock is held by C code."""

    def __init__(self, program: str = HOLDS_THE_LOCK) -> None:
        self.selector = selectors.DefaultSelector()
        self.answers: list[WorkerAnswered] = []
        self.told: list[AllowTracer] = []
        self.stacks = OutsideStacks(self.selector, self.answers.append, self.told.append)
        self.process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        up = WorkerUp("w", Endpoint(host="h"), 0, 0, int(self.process.stdout.readline()))
        self.worker = SimpleNamespace(id="w", pid=self.process.pid, inner=0, up=up, status=None)

    def ask(self, level: str) -> WorkerStacks:
        self.stacks.take(self.worker, AskWorker("w", 1, ShowStacks(level)), level)
        while not self.answers:
            self.turn()
        return self.answers.pop().answer

    def turn(self) -> None:
        for key, mask in self.selector.select(self.stacks.patience()):
            key.data(mask)
        self.stacks.check()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.stacks.close()
        self.selector.close()


@pytest.fixture
def scene():
    scene = Scene()
    yield scene
    scene.end()


def test_signal_shows_the_stack_of_code_that_holds_the_interpreters_lock(scene):
    for _ in range(2):
        answer = scene.ask(SIGNAL)
        assert (answer.fault, answer.level) == ("", SIGNAL)
        assert "method_of_the_user" in [frame.function for frame in answer.stacks[0].frames]
    assert scene.process.poll() is None


def test_stopped_process_is_named_and_its_late_stacks_are_not_those_of_the_next_question(scene, monkeypatch):
    monkeypatch.setattr(outside_stacks, "FIRST_S", 0.05)
    os.kill(scene.process.pid, signal.SIGSTOP)
    assert scene.ask(SIGNAL).fault.startswith("its process is stopped")
    os.kill(scene.process.pid, signal.SIGCONT)
    monkeypatch.setattr(outside_stacks, "FIRST_S", 100.0)
    assert len(scene.ask(SIGNAL).stacks) == 1


def test_signal_is_not_sent_to_a_process_that_would_end_by_it():
    scene = Scene("import os, time; print(os.pipe()[0], flush=True); time.sleep(100)")
    try:
        assert "taken signal" in scene.ask(SIGNAL).fault
        assert not handles(scene.process.pid, signal.SIGINT + 62)
        assert scene.process.poll() is None
    finally:
        scene.end()


@pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")
@pytest.mark.parametrize("scope", [0, 1])
def test_py_spy_shows_it_too_and_may_trace_only_while_it_runs(scene, monkeypatch, scope):
    monkeypatch.setattr(outside_stacks, "yama", lambda: scope)
    if scope:  # the worker cannot answer: after a moment py-spy starts anyway
        monkeypatch.setattr(outside_stacks, "GRANT_S", 0.01)
    answer = scene.ask(PY_SPY)
    if "may not trace" in answer.fault:
        pytest.skip(answer.fault)
    assert (answer.fault, answer.level) == ("", PY_SPY)
    assert "method_of_the_user" in [frame.function for frame in answer.stacks[0].frames]
    assert [packet.pid > 0 for packet in scene.told] == [True, False][: 2 * scope]
    assert pace.again_like(lambda: _reap(), True)


def test_py_spy_waits_until_the_worker_has_allowed_it(scene, monkeypatch):
    monkeypatch.setattr(outside_stacks, "yama", lambda: 1)
    monkeypatch.setattr(outside_stacks, "find_py_spy", lambda: "/bin/echo")
    scene.stacks.take(scene.worker, AskWorker("w", 1, ShowStacks(PY_SPY)), PY_SPY)
    (asked,) = scene.told
    scene.stacks.allowed(TracerAllowed("w", asked.pid + 1))
    assert scene.stacks.patience() <= outside_stacks.GRANT_S
    scene.stacks.allowed(TracerAllowed("w", asked.pid))
    while not scene.answers:
        scene.turn()
    assert scene.answers[0].answer.fault.startswith("py-spy: ")  # echo is none
    assert [packet.pid for packet in scene.told] == [asked.pid, 0]
    assert pace.again_like(lambda: _reap(), True)


def test_a_node_without_py_spy_says_how_to_install_it(scene, monkeypatch):
    monkeypatch.setattr(outside_stacks, "find_py_spy", lambda: "")
    assert f"{sys.executable} -m pip install py-spy" in scene.ask(PY_SPY).fault
    assert scene.ask("x-ray").fault == "there is no level 'x-ray' of stacks"


def _reap() -> bool:
    """Reap the children that have ended, as the template does; True if none but the worker is left."""
    for pid in procfs.children(os.getpid()):
        stat = procfs.stat(pid)
        if stat is not None and stat.state == "Z":
            os.waitpid(pid, 0)
            return _reap()
    return True
